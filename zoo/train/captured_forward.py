"""A forward pass as CUDA graphs, such as the losses of a validation batch."""

import logging
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from zoo.generation.cuda_graph import Recording, casts_not_cached
from zoo.train.capture_agreement import one_line
from zoo.train.captured_passes import TOLERANCE
from zoo.train.static_inputs import MOST_SHAPES, Compute, StaticInputs, addresses, eager, packed_documents

log = logging.getLogger(__name__)


class CapturedForward:
    """CUDA graphs of a function without gradients, such as the losses of a validation batch.

    A graph is captured at the first call for each shape of the inputs and packed documents, as by a `CapturedStep`, and
    a replay is compared with the eager result. Inputs of other shapes than the first MOST_SHAPES run eagerly. If the
    function cannot be captured, every call runs eagerly, and the log says so.

    Args:
        compute: Inputs, and `cu_seqlens` if documents are packed → tensors. It must not wait for the device.
        parameters: All parameters that `compute` uses.
        recorder: As for a `CapturedStep`; graphs of the same recorder share memory.
        failed: Called if the function cannot be captured.

    Attributes:
        refused: Reason why everything runs eagerly; None if nothing failed.
    """

    def __init__(
        self,
        compute: Compute,
        parameters: Iterable[nn.Parameter],
        recorder: Recording,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._compute, self._parameters, self._recorder, self._failed = compute, list(parameters), recorder, failed
        self.refused: str | None = None
        self._memory = addresses(self._parameters)
        self._graphs: list[tuple[StaticInputs, Callable[[], tuple[Tensor, ...]]]] = []

    def __call__(self, *inputs: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the results as new tensors; the arguments are those of a `CapturedStep`."""
        if self._memory != (memory := addresses(self._parameters)):
            self._memory, self._graphs = memory, []  # parameters were moved
        packed = packed_documents(inputs, cu_seqlens)
        graph = next((each for each in self._graphs if each[0].serve(inputs, packed)), None)
        if graph is None and self.refused is None and len(self._graphs) < MOST_SHAPES:
            graph = self._capture(inputs, cu_seqlens)
        if graph is None:
            return eager(self._compute, inputs, cu_seqlens)
        static, replay = graph
        static.fill(inputs, packed)
        return tuple(x.clone() for x in replay())

    def _capture(
        self, inputs: tuple[Tensor, ...], cu_seqlens: Tensor | None
    ) -> tuple[StaticInputs, Callable[[], tuple[Tensor, ...]]] | None:
        """Capture and check a graph for inputs of this shape; return None if that fails."""
        with torch.inference_mode(False), torch.no_grad(), casts_not_cached():
            static = StaticInputs.copied(inputs, cu_seqlens)
            step = partial(eager, self._compute, static.inputs)
            try:
                # first with padded boundaries, then with those of the batch
                expected = self._recorder.rehearse(partial(step, static.cu_seqlens))
                expected = expected if cu_seqlens is None else self._recorder.rehearse(partial(step, cu_seqlens))
                replay = self._recorder.record(partial(step, static.cu_seqlens))
                pairs = zip(replay(), expected, strict=True)
                if not all(torch.allclose(x.float(), y.float(), rtol=TOLERANCE, equal_nan=True) for x, y in pairs):
                    raise RuntimeError("a replay has other results than the eager forward pass")
            except RuntimeError as error:
                self._graphs.clear()
                self._failed()
                self.refused = one_line(error)
                log.warning("cuda_graph: validation runs eagerly: %s", self.refused)
                return None
        self._graphs.append((static, replay))
        return self._graphs[-1]
