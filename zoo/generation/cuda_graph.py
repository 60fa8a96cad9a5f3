"""Capturing functions as CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
from torch import nn

Made = TypeVar("Made")


class Recorder:
    """Captures functions as CUDA graphs, on one stream and with one pool of memory.

    What one graph leaves in memory may be read by the others, so they must be replayed in the order of their capture.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def rehearse(self, work: Callable[[], Made]) -> Made:
        """Run what has to happen before a capture, such as compiling kernels, on the stream of the captures."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                result = work()
            torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def record(self, step: Callable[[], Made]) -> Callable[[], Made]:
        """Capture `step`, which works on tensors whose memory stays the same, without running it.

        Returns:
            A function that runs the step and returns its result, always in the same tensors.

        Raises:
            RuntimeError: The step cannot be captured, for instance because it waits for the device.
        """
        # a capture that fails leaves its stream behind as the current one
        with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.current_stream(self._device)):
            graph = torch.cuda.CUDAGraph()
            generator = torch.cuda.default_generators[torch.cuda.current_device()]
            draws = generator.clone_state()
            try:
                # other threads, such as those that pin batches, may continue
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    result = step()
            except RuntimeError as error:
                torch.cuda.synchronize()
                generator.graphsafe_set_state(draws)  # otherwise it stays in capture mode and cannot be used
                self._drop_pool()
                cause = error.__context__  # ending the capture raises an error that only says that there was one
                raise cause if isinstance(cause, RuntimeError) else error from None

        def replay() -> Made:
            graph.replay()
            return result

        return replay

    def _drop_pool(self) -> None:
        """Use another pool of memory from now on: PyTorch continues to fill that of a failed capture."""
        with suppress(RuntimeError):
            index = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(index, self._pool)
            torch._C._cuda_releasePool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


def capture(rehearse: Callable[[], None], step: Callable[[], Made], device: torch.device) -> Callable[[], Made]:
    """Capture `step` as a CUDA graph, as `Recorder.record` does, after `rehearse`.

    `rehearse` does everything that only the first call of a step does. A RuntimeError if the step cannot be captured.
    """
    recorder = Recorder(device)
    recorder.rehearse(rehearse)
    return recorder.record(step)


def no_graphs(device: torch.device) -> str | None:
    """Return why a device has no CUDA graphs; None if it has."""
    return None if device.type == "cuda" else f"the device is a {device.type}, and CUDA graphs need an NVIDIA GPU"


def hooked_module(model: nn.Module) -> str | None:
    """Return the name of the first module with hooks on its calls or gradients; None if there is none."""
    for name, part in model.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return name or type(part).__name__
    return None


@contextmanager
def casts_not_cached() -> Iterator[None]:
    """Keep autocast from caching its casts of weights, which would be gone when the graph is replayed."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
