"""The parts of a step after its backward pass as CUDA graphs: average, norm, clipping and the optimiser's update."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.generation.cuda_graph import Made, Recording
from zoo.train.adamw import AdamW
from zoo.train.capture_agreement import one_line
from zoo.train.captured_passes import CapturedPasses, norm
from zoo.train.gradient_average import GradientAverage
from zoo.train.muon import Muon
from zoo.train.optim import clip

log = logging.getLogger(__name__)


class CapturedUpdate:
    """The parts of a `CapturedStep` that work on its gradients, each captured when it is first used.

    A part runs eagerly if the gradients are not in the memory of the graphs.

    Args:
        recorder: Returns what captures the parts.
        average: Averages the gradients over all processes; None for one process.
        refuse: Called with the reason if a part cannot be captured.
    """

    def __init__(
        self, recorder: Callable[[], Recording], average: GradientAverage | None, refuse: Callable[[str], None]
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
            self._refuse(one_line(error))
            return None
