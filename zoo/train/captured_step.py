"""A training step as CUDA graphs, which replace hundreds of kernel launches by a few."""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from mixers import ContextParallel
from zoo.arguments import first_line
from zoo.generation.cuda_graph import Made, Recorder
from zoo.train.adamw import AdamW
from zoo.train.captured_memory import (
    MOST_SHAPES,
    CaptureAgreement,
    Compute,
    GradientAverage,
    addresses,
    eager,
    packed_documents,
)
from zoo.train.captured_passes import CapturedPasses, norm
from zoo.train.muon import Muon
from zoo.train.optim import clip

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
        recorder: Recorder | None = None,
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

    def _recorder(self) -> Recorder:
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
            self._refuse(first_line(error))
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


class CapturedUpdate:
    """The parts of a `CapturedStep` that work on its gradients, each captured when it is first used.

    A part runs eagerly if the gradients are not in the memory of the graphs.

    Args:
        recorder: Returns what captures the parts.
        average: Averages the gradients over all processes; None for one process.
        refuse: Called with the reason if a part cannot be captured.
    """

    def __init__(
        self, recorder: Callable[[], Recorder], average: GradientAverage | None, refuse: Callable[[str], None]
    ) -> None:
        self._recorder, self._average, self._refuse = recorder, average, refuse
        self._exchanges = 0  # the first one is eager: it connects the processes
        self._odd_update_reported = False
        self._max_norm = 0.0  # when the clipping was captured

    def restart(self, passes: CapturedPasses, *, same_parameters: bool) -> None:
        """Drop all graphs, for the gradients of these passes from now on.

        Averages are dropped only if parameters were moved, frozen or unfrozen, which all processes do. If one process
        stops to capture, the sizes that it exchanges must not change.
        """
        self._passes = passes
        if self._average is not None and not same_parameters:
            self._average.forget()
            self._exchanges = 0
        self._exchange: Callable[[], None] | None = None
        self._norm: Callable[[], Tensor] | None = None
        self._clip: Callable[[], None] | None = None
        self._update: Callable[[], None] | None = None
        self._settings: Any = None  # of the optimiser, when its update was captured

    @property
    def parts(self) -> int:
        """Number of graphs captured so far."""
        return sum(part is not None for part in (self._exchange, self._norm, self._clip, self._update))

    def gradient_norm(self) -> Tensor:
        """Return the total norm of the gradients, a scalar; with several processes, average them first."""
        if self._average is not None:
            self._exchanged()
        return self._present_norm()

    def _present_norm(self) -> Tensor:
        if not self._attached():
            return norm(parameter.grad for parameter in self._passes.parameters)
        if self._norm is None:
            gradients = [parameter.grad for parameter in self._passes.parameters]
            self._norm = self._recorded(lambda: norm(gradients))
        return self._present_norm() if self._norm is None else self._norm().clone()

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale the gradients, whose total norm is `norm`, to a norm of at most `max_norm`."""
        if not self._attached() or (self._clip is not None and max_norm != self._max_norm):
            clip([parameter for parameter in self._passes.parameters if parameter.grad is not None], max_norm, norm)
            return
        if self._clip is None:
            self._max_norm, self._clipped_norm = max_norm, norm.clone()
            parameters = [parameter for parameter in self._passes.parameters if parameter.grad is not None]
            self._clip = self._recorded(lambda: clip(parameters, max_norm, self._clipped_norm))
        if self._clip is None:
            self.clip(max_norm, norm)
            return
        self._clipped_norm.copy_(norm)
        self._clip()

    def update(self, optimizer: AdamW | Muon) -> bool:
        """Replay the optimiser's update and return True; return False if it has to run eagerly."""
        if not self._attached():
            return False
        if self._update is None:
            updated = [parameter for parameter in self._passes.parameters if parameter.grad is not None]
            if not all(optimizer.state[parameter] for parameter in updated):
                return False  # the first update allocates the optimiser's state
            self._settings = optimizer.settings()
            self._found_inf = torch.zeros((), device=updated[0].device)
            found_inf, optimizer.found_inf = optimizer.found_inf, self._found_inf
            self._update = self._recorded(lambda: optimizer.update(captured=True))
            optimizer.found_inf = found_inf
        if self._update is None or self._settings != optimizer.settings():
            if self._update is not None and not self._odd_update_reported:
                self._odd_update_reported = True
                log.warning("cuda_graph: the update runs eagerly, since settings other than the learning rate change")
            return False
        if optimizer.found_inf is None:
            self._found_inf.zero_()
        else:
            self._found_inf.copy_(optimizer.found_inf)
        self._update()
        return True

    def _exchanged(self) -> None:
        """Replace the gradients by their means over all processes; each process calls it once a step."""
        assert self._average is not None
        own = [parameter.grad for parameter in self._passes.parameters]
        self._average.allocate(own)
        shared = list(self._passes.gradients)
        in_graph = bool(shared) and all(x is gradient for x, gradient in zip(own, shared, strict=True))
        if in_graph and self._exchange is None and self._exchanges:
            average = self._average
            self._exchange = self._recorded(lambda: average(shared))
        self._exchanges += 1
        if in_graph and self._exchange is not None:
            self._exchange()
        else:
            self._average(own)
        for parameter, mean in zip(self._passes.parameters, self._average.results, strict=True):
            parameter.grad = mean

    def _attached(self) -> bool:
        """Return whether the gradients are in the memory that the graphs use."""
        gradients = self._passes.gradients if self._average is None else self._average.results
        if not (self._passes.gradients and gradients):
            return False
        return all(parameter.grad is x for parameter, x in zip(self._passes.parameters, gradients, strict=True))

    def _recorded(self, step: Callable[[], Made]) -> Callable[[], Made] | None:
        """Return the replay of a step; if it cannot be captured, return None and run everything eagerly from now on."""
        try:
            return self._recorder().record(step)
        except RuntimeError as error:
            self._refuse(first_line(error))
            return None
