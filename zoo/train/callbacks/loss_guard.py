"""Steps that would spoil the model are not taken."""

from collections import deque
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.errors import UserError
from zoo.train.callbacks.run_callback import RunCallback


class Diverged(UserError):
    """Too many steps in a row were not taken."""


class Taken(NamedTuple):
    """What the device will have found out about a step.

    Attributes:
        numbers: Whether the step was bad, its loss, and the norm of its gradients, in the memory of the host.
        copied: When they are there; None if they are.
    """

    numbers: Tensor
    copied: torch.cuda.Event | None


class LossGuard(RunCallback):
    """Does not apply a step, in any process, whose loss or gradients are not finite, or whose loss is far too high.

    The parameters and the optimiser stay as they are; the step counts, and its data is behind. `skipped_steps` is
    logged. After `patience` such steps in a row the run is saved and ends with an error.

    On a GPU the fused AdamW leaves out a bad step by itself, and the host reads what it did when it has launched the
    next forward pass. So the device never waits for the host, and what is logged and counted here is a step behind.

    Args:
        spike: A step is also not taken if its loss, or the norm of its gradients, is more than so many times the
            median of the last `window` steps; null takes all that are finite. (ZeRO knows the norm too late.)
        window: Steps of that median; before there are half as many, none counts as too high.
        patience: Steps in a row that may be skipped; the run ends with the next one.

    Raises:
        UserError: An argument is out of range.
    """

    key = "guard"
    order = 100

    def __init__(self, spike: float | None = None, window: int = 100, patience: int = 10) -> None:
        if (spike is not None and spike <= 1) or window < 2 or patience < 0:
            raise UserError(
                f"guard: spike is {spike}, window {window} and patience {patience}; they must be above 1 or null, "
                "at least 2, and at least 0."
            )
        self.spike, self.window, self.patience = spike, window, patience
        self.skipped = 0
        self._in_a_row = 0
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)
        self._loss = torch.zeros(())  # of the last batch
        self._last: Taken | None = None  # the last step, until it is counted
        self._step = 0  # those done when it began
        self._left_out_by_strategy = False  # ZeRO's engine has the gradients, and does so itself

    def state_dict(self) -> dict[str, Any]:
        """What the next steps are compared with, the same in all processes."""
        self._settle()
        kept = {"losses": list(self._losses), "norms": list(self._norms)}
        return {"skipped": self.skipped, "in_a_row": self._in_a_row, **kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on."""
        self.skipped, self._in_a_row = state_dict["skipped"], state_dict["in_a_row"]
        self._losses.extend(state_dict["losses"])
        self._norms.extend(state_dict["norms"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Know where the run starts, and who leaves bad steps out."""
        self._step = trainer.global_step
        self._left_out_by_strategy = hasattr(type(trainer.strategy), "step_was_skipped")

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Turn all gradients of a bad loss into nan, so that every process sees that they are.

        Nothing waits for the device here but for the last step: it is between two passes, with much to do.
        """
        self._settle()
        mean = loss.detach().clone()
        if self.spike is not None and trainer.world_size > 1:  # all processes compare the same
            dist.all_reduce(mean)  # (Lightning's has a barrier, which the host waits for)
            mean /= trainer.world_size
        fine = mean.isfinite() & (mean <= self._limit(self._losses))
        loss.register_hook(lambda gradient: torch.where(fine, gradient, torch.full_like(gradient, float("nan"))))
        self._loss = mean

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimiser do nothing if the gradients are bad."""
        if self._left_out_by_strategy:
            return
        norm = pl_module.gradient_norm()
        bad = ~(norm.isfinite() & (norm <= self._limit(self._norms)))
        self._last = _told(bad, self._loss, norm)
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None  # which uses the same means
        if optimizer.defaults.get("fused") and not scaled:
            optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        elif bad:
            for parameter in pl_module.parameters():
                parameter.grad = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count, and end the run if it is enough."""
        if trainer.global_step == self._step:
            return  # gradients are still being accumulated
        self._step = trainer.global_step
        if self._left_out_by_strategy:
            norm = trainer.strategy.gradient_norm
            if norm is not None:
                self.log("gradient_norm", norm)
            self._count(trainer.strategy.step_was_skipped, self._loss, norm)
        elif self._last is not None and (self._last.copied is None or trainer.global_step == trainer.max_steps):
            self._settle()
        self.log("skipped_steps", self.skipped)
        if self._in_a_row > self.patience:
            raise Diverged(
                f"{self._in_a_row} steps in a row had a loss or gradients that are not finite"
                f"{'' if self.spike is None else ' or far too high'}, and were not taken (the last loss was "
                f"{float(self._loss):.4g}). The last checkpoint has the parameters from before them; try a lower "
                "optim.learning_rate, or continue with a larger guard.patience."
            )

    def _settle(self) -> None:
        """Count the last step, if that was not done."""
        if self._last is None:
            return
        numbers, copied = self._last
        if copied is not None:
            copied.synchronize()
        self._last = None
        bad, loss, norm = numbers.tolist()
        self._count(bool(bad), loss, norm)

    def _count(self, bad: bool, loss: Tensor | float, norm: float | None) -> None:
        if bad:
            self.skipped += 1
            self._in_a_row += 1
            return
        self._in_a_row = 0
        if self.spike is not None:
            self._losses.append(float(loss))
            self._norms += [] if norm is None else [norm]

    def _limit(self, before: deque[float]) -> float:
        """What is above it is too high."""
        if self.spike is None or 2 * len(before) < self.window:
            return float("inf")
        return self.spike * median(before)


def _told(*scalars: Tensor) -> Taken:
    """Scalars of a device on their way to the host; nothing waits for them."""
    numbers = torch.stack([scalar.detach().float() for scalar in scalars])
    if not numbers.is_cuda:
        return Taken(numbers, None)
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return Taken(host, copied)
