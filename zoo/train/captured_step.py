"""A training step as CUDA graphs, which replace hundreds of kernel launches by a few."""

import logging
from collections.abc import Iterable

from torch import Tensor, nn

from mixers import ContextParallel
from zoo.generation.cuda_graph import Recorder, Recording
from zoo.train.adamw import AdamW
from zoo.train.capture_agreement import CaptureAgreement, one_line
from zoo.train.captured_passes import CapturedPasses
from zoo.train.captured_update import CapturedUpdate
from zoo.train.gradient_average import GradientAverage
from zoo.train.muon import Muon
from zoo.train.static_inputs import MOST_SHAPES, Compute, addresses, eager, packed_documents

log = logging.getLogger(__name__)


class CapturedStep:
    """A loss and its backward pass, the gradient norm, clipping and the optimiser's update, each as a CUDA graph.

    Each part has a graph, so that code between the parts of an eager step also runs between the replays, on the same
    tensors: hooks of the loss, callbacks that read or change gradients, a skipped update. Each part is captured when it
    is first used, and the passes once for each shape of the inputs. All shapes share the memory of the gradients. The
    shape of packed documents includes their number, rounded up to a power of two, and whether they are long enough for
    other launches (`StaticDocuments`). The first `prepare` for a shape also runs the step eagerly, compares a replay
    with it, and discards the gradients of both. Batches of other shapes than the first MOST_SHAPES run eagerly, with
    the same results. If a part cannot be captured, every step runs eagerly. The log says so once.

    Processes that share sequences send each other messages within the passes, in the same order whether they replay
    them or not. So all of them must get batches of the same shapes, and they agree whether to run further passes: they
    capture a shape together, or none of them captures more. An error in an eager pass is raised, since the other
    processes wait for its messages.

    Args:
        compute: Inputs → a scalar loss, and further tensors without gradients. It must not wait for the device.
        parameters: All parameters that `compute` uses. The gradients of trained ones stay at the same addresses.
        recorder: Captures the parts; None for CUDA graphs.
        average: Averages the gradients over all processes, before their norm; None for one process.
        sharing: The processes that share each sequence in `compute`; None if it exchanges nothing.
        may_draw: Whether `compute` may draw random numbers on the device; False if it recomputes activations.

    Attributes:
        refused: Reason why everything runs eagerly; None if nothing failed.
    """

    def __init__(
        self,
        compute: Compute,
        parameters: Iterable[nn.Parameter],
        recorder: Recording | None = None,
        average: GradientAverage | None = None,
        sharing: ContextParallel | None = None,
        *,
        may_draw: bool = True,
    ) -> None:
        self.refused: str | None = None
        self._compute, self._all, self._may_draw = compute, list(parameters), may_draw
        self._own_recorder = recorder
        self._agreement, self._average = CaptureAgreement(sharing), average
        self._update = CapturedUpdate(self._recorder, average, self._refuse)
        self._odd_shapes_reported = False
        self._memory: list[tuple[int, bool]] | None = None
        self.forget()

    def forget(self) -> None:
        """Drop all graphs, which are captured again when they are used."""
        memory, before = addresses(self._all), self._memory
        self._memory = memory
        trained = [parameter for parameter in self._all if parameter.requires_grad]
        self._passes = CapturedPasses(
            self._compute, trained, self._recorder, self._agreement, self._average, may_draw=self._may_draw
        )
        self._update.restart(self._passes, same_parameters=memory == before)

    def _recorder(self) -> Recording:
        """Return what captures the parts; CUDA graphs by default, on the device that the parameters have now."""
        if self._own_recorder is None:
            self._own_recorder = Recorder(self._passes.parameters[0].device)
        return self._own_recorder

    def prepare(self, *inputs: Tensor, cu_seqlens: Tensor | None = None, first: bool = True) -> None:
        """Capture the passes for inputs of this shape unless that is done; call it before each forward pass.

        Args:
            inputs: Inputs of `compute`.
            cu_seqlens, first: As in `__call__`.
        """
        if self._memory != addresses(self._all):
            self.forget()  # parameters were moved, frozen or unfrozen
            self._agreement.forget()
        packed = packed_documents(inputs, cu_seqlens)
        reason = self._agreement.vote(inputs, packed, first, self.refused)
        if reason is not None and self.refused is None:
            self._refuse(reason)
        graphs = self._passes.serving(inputs, packed)
        done = graphs is not None and first in graphs.passes and True in graphs.passes
        if self.refused is not None or done or (graphs is None and not self._has_room()):
            return
        parameters = self._passes.parameters
        attached = [parameter.grad for parameter in parameters]
        values = [None if gradient is None or first else gradient.clone() for gradient in attached]
        try:
            self._passes.capture(graphs, inputs, cu_seqlens, first)
        except RuntimeError as error:
            if self._agreement.must_raise(error):
                raise
            self._refuse(one_line(error))
        for parameter, gradient, value in zip(parameters, attached, values, strict=True):
            parameter.grad = gradient
            if gradient is not None and value is not None:
                gradient.copy_(value)  # the check overwrote the gradients, which all shapes share

    def __call__(self, *inputs: Tensor, cu_seqlens: Tensor | None = None, first: bool = True) -> tuple[Tensor, ...]:
        """Return the loss, whose `backward` replays the backward pass, and the further results of `compute`.

        Args:
            inputs: Inputs of `compute`; the first is [B,T,…] if documents are packed.
            cu_seqlens: Boundaries [N+1] of packed documents, passed to `compute` by this name; None without documents.
            first: Whether the backward pass overwrites the gradients; False to accumulate them.
        """
        packed = packed_documents(inputs, cu_seqlens)
        graphs = self._passes.serving(inputs, packed)
        if graphs is None or first not in graphs.passes:
            return eager(self._compute, inputs, cu_seqlens)
        return self._passes.replay(graphs, inputs, packed, first)

    def _has_room(self) -> bool:
        """Return whether another shape may be captured; if not, say so once in the log."""
        if len(self._passes.graphs) < MOST_SHAPES:
            return True
        if not self._odd_shapes_reported:
            self._odd_shapes_reported = True
            log.warning("cuda_graph: batches of other shapes than the first %d run eagerly", MOST_SHAPES)
        return False

    def _refuse(self, reason: str) -> None:
        self.forget()
        self.refused = reason
        log.warning("cuda_graph: the training step runs eagerly: %s", reason)

    @property
    def parts(self) -> int:
        """Number of graphs captured so far."""
        return 2 * sum(len(graphs.passes) for graphs in self._passes.graphs) + self._update.parts

    def gradient_norm(self) -> Tensor:
        """Return the total norm of the gradients, a scalar; with several processes, average them first."""
        return self._update.gradient_norm()

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients, whose total norm is `norm`, to a norm of at most `max_norm`."""
        self._update.clip(max_norm, norm)

    def update(self, optimizer: AdamW | Muon) -> bool:
        """Replay the optimiser's update and return True; return False if it has to run eagerly."""
        return self._update.update(optimizer)
