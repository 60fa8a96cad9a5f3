"""Decoding token by token from a state; on a GPU as one CUDA graph, which costs no more to launch than one kernel."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

log = logging.getLogger(__name__)


class Decoder:
    """A language model that reads one more token of each sequence per call.

    On a GPU the first call captures the step as a CUDA graph, with the state in fixed tensors, and every call is one
    launch. If that is impossible (a state that grows, a mixer that synchronises) the model is called directly, and the
    reason is logged. The weights must not move in memory.

    Args:
        model: A language model of the zoo.
        state: The initial state, usually after a prompt; it is consumed.
        capture: Whether to capture; None captures on a GPU unless several processes run.

    Attributes:
        state: The state after all tokens so far. The next call may overwrite it.
        refused: Why capturing failed; None if it did not.
    """

    def __init__(self, model: Any, state: Any, *, capture: bool | None = None) -> None:
        self.model, self.state = model, state
        self.refused: str | None = None
        self._capture = capture
        self._replay: Callable[[], Tensor] | None = None

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens [B,1] int → logits [B,1,vocab]; the next call may overwrite them."""
        if self._capture is None:
            # a sharded model gathers its weights in every step
            self._capture = tokens.is_cuda and not (dist.is_available() and dist.is_initialized())
        if self._capture and self._replay is None and self.refused is None:
            self._prepare(tokens)
        if self._replay is not None:
            if tokens.shape != self._tokens.shape:
                raise ValueError(f"tokens: expected {tuple(self._tokens.shape)}, got shape {tuple(tokens.shape)}")
            self._tokens.copy_(tokens)
            return self._replay()
        logits, self.state = self.model(tokens, self.state)
        return logits

    def _prepare(self, tokens: Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad(), _casts_not_cached():
            # the state after a prompt may consist of views, or of tensors in use elsewhere
            state, self._tokens = tree_map(_copy, self.state), tokens.clone()

            def rehearse() -> None:  # compiles kernels, and must not change the state
                _, after = self.model(self._tokens, tree_map(_copy, state))
                if not fits(state, after):
                    raise RuntimeError("the state changes its shape or dtype with every token")

            def step() -> Tensor:
                logits, after = self.model(self._tokens, state)
                overwrite(state, after)
                return logits

            try:
                self._replay = capture(rehearse, step, tokens.device)
            except RuntimeError as error:
                self.refused = " ".join(str(error).split())
                log.info("decoding without a CUDA graph: %s", self.refused)
            else:
                self.state = state


def capture(rehearse: Callable[[], None], step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Capture `step` as a CUDA graph, without running it.

    Args:
        rehearse: Called first, for work that only the first call of a step does, such as compiling.
        step: The function to capture; it must work on fixed tensors.
        device: A GPU.

    Returns:
        A function that replays the step and returns its result, always in the same tensor.

    Raises:
        RuntimeError: The step cannot be captured.
    """
    with torch.cuda.device(device):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            rehearse()
        torch.cuda.current_stream().wait_stream(stream)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random_state = generator.clone_state()
        try:
            # other threads, such as those that pin batches, may keep using CUDA
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = step()
        except RuntimeError:
            torch.cuda.synchronize()
            generator.graphsafe_set_state(random_state)  # otherwise the generator stays unusable
            raise

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def fits(state: Any, following: Any) -> bool:
    """Whether the tensors of `state` can hold `following` without loss."""
    pairs = zip(tree_leaves(state), tree_leaves(following), strict=True)
    return all(old.shape == new.shape and torch.promote_types(old.dtype, new.dtype) == old.dtype for old, new in pairs)


def overwrite(state: Any, following: Any) -> None:
    """Copy `following` into the tensors of `state`, skipping tensors that are there already."""
    pairs = list(zip(tree_leaves(state), tree_leaves(following), strict=True))
    storages = {old.untyped_storage().data_ptr() for old, _ in pairs}
    copies: dict[tuple[torch.dtype, ...], tuple[list[Tensor], list[Tensor]]] = {}  # grouped, for few launches
    for old, new in pairs:
        if new.numel() and new.data_ptr() != old.data_ptr():
            targets, sources = copies.setdefault((old.dtype, new.dtype), ([], []))
            targets.append(old)
            # a view of the old state could be overwritten before it is read
            sources.append(new.clone() if new.untyped_storage().data_ptr() in storages else new)
    for targets, sources in copies.values():
        torch._foreach_copy_(targets, sources)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@contextmanager
def _casts_not_cached() -> Iterator[None]:
    """Disable autocast's cache of cast weights, whose tensors would be freed before a graph is replayed."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
