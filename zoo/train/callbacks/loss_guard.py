"""Skips optimiser steps with non-finite or far too high losses or gradients."""

import shlex
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from kernels.errors import UserError
from zoo.train.callbacks.run_callback import RunCallback

WINDOW = 100  # steps


class Diverged(UserError):
    """Too many steps in a row were skipped."""


class Outcome(NamedTuple):
    """Numbers about a step on their way to the host: whether it was bad, its loss, and its gradient norm."""

    numbers: Tensor
    copied: torch.cuda.Event | None  # marks the end of the copy; None if it is done


class LossGuard(RunCallback):
    """Skips steps, in all processes, whose loss or gradients are not finite or far too high.

    A skipped step leaves parameters and optimiser state as they are; it counts as a step, and its data is consumed.
    `skipped_steps` is logged. After more than `patience` such steps in a row the run is saved and ends with an error.

    On a GPU the fused AdamW skips a bad step without the host, which reads the outcome after launching the next forward
    pass. So the device never waits for the host, and the numbers logged and counted here lag one step behind.

    Args:
        spike: Also skip a step whose loss or gradient norm exceeds this multiple of the median of the last `window`
            steps; null skips non-finite steps only. (With ZeRO, which knows the norm too late, only the loss counts.)
        window: Number of steps in the median; until half of them are recorded, no step counts as too high.
        patience: Number of steps in a row that may be skipped; the run ends with the next one.

    Raises:
        UserError: An argument is out of range.
    """

    key = "guard"
    order = 100

    def __init__(self, spike: float | None = None, window: int = WINDOW, patience: int = 10) -> None:
        if (spike is not None and spike <= 1) or window < 2 or patience < 0:
            raise UserError(
                f"guard: spike is {spike}, window {window} and patience {patience}; they must be above 1 or null, "
                "at least 2, and at least 0."
            )
        if spike is None and window != WINDOW:
            raise UserError(
                f"guard.window is {window}, but guard.spike is null, so that no step counts as too high; set "
                f"guard.spike, or guard.window to {WINDOW}."
            )
        self.spike, self.window, self.patience = spike, window, patience
        self.skipped = 0
        self._in_a_row = 0
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)
        self._loss = torch.zeros(())  # of the last batch
        self._last: Outcome | None = None  # of the last step, until it is counted
        self._step = 0  # steps done when the step in progress began
        self._skipped_by_strategy = False  # ZeRO's engine holds the gradients, and skips bad steps itself

    def state_dict(self) -> dict[str, Any]:
        """The recorded losses and norms, and the counts; the same in all processes."""
        self._settle()
        kept = {"losses": list(self._losses), "norms": list(self._norms)}
        return {"skipped": self.skipped, "in_a_row": self._in_a_row, **kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped, self._in_a_row = state_dict["skipped"], state_dict["in_a_row"]
        self._losses.extend(state_dict["losses"])
        self._norms.extend(state_dict["norms"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Note where the run starts, and whether the strategy skips bad steps."""
        self._step = trainer.global_step
        if pl_module.changes:  # of the config, which may be the remedy
            self._in_a_row = 0
        self._skipped_by_strategy = hasattr(type(trainer.strategy), "step_was_skipped")

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Turn all gradients of a bad loss into nan, so that every process sees it.

        The host waits for the device only to read the last step's outcome, while the forward pass is still running.
        """
        self._settle()
        mean = loss.detach().clone()
        if self.spike is not None and trainer.world_size > 1:  # all processes must compare the same number
            dist.all_reduce(mean)  # not Lightning's, whose barrier blocks the host
            mean /= trainer.world_size
        fine = mean.isfinite() & (mean <= self._limit(self._losses))
        loss.register_hook(lambda gradient: torch.where(fine, gradient, torch.full_like(gradient, float("nan"))))
        self._loss = mean

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimiser skip the step if the gradients are bad."""
        if self._skipped_by_strategy:
            return
        norm = pl_module.gradient_norm()
        bad = ~(norm.isfinite() & (norm <= self._limit(self._norms)))
        if trainer.world_size > 1:  # a gradient may have become bad in one process, after they were averaged
            anywhere = bad.float()
            dist.all_reduce(anywhere, dist.ReduceOp.MAX)
            bad = anywhere > 0
        self._last = _copied_to_host(bad, self._loss, norm)
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None  # a scaler sets found_inf itself
        if optimizer.defaults.get("fused") and not scaled:
            optimizer.found_inf = bad.float()  # type: ignore[attr-defined]
        elif bad:
            for parameter in pl_module.parameters():
                parameter.grad = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Count the step, and end the run after too many skipped ones."""
        if trainer.global_step == self._step:
            return  # gradients are still being accumulated
        self._step = trainer.global_step
        if self._skipped_by_strategy:
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
                f"{'' if self.spike is None else ' or far too high'}, and were skipped (the last loss was "
                f"{float(self._loss):.4g}). The last checkpoint has the parameters from before them; "
                f"{_advice(Path(trainer.default_root_dir), pl_module)}."
            )

    def _settle(self) -> None:
        """Count the last step if it is not counted yet."""
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

    def _limit(self, recorded: deque[float]) -> float:
        """The largest value that is not too high."""
        if self.spike is None or 2 * len(recorded) < self.window:
            return float("inf")
        return self.spike * median(recorded)


def _advice(run: Path, pl_module: Any) -> str:
    """Name the command that continues a run with half of its learning rate."""
    if not isinstance(pl_module.optim.schedule, str):  # a class keeps the rate in its state
        return "start a new run with a lower optim.learning_rate, or continue with a larger guard.patience"
    rate = f"--optim.learning_rate={pl_module.optim.learning_rate / 2:g}"
    earlier = sorted((run / "checkpoints").glob("step-*.ckpt"))
    advice = f"continue with half of the rate: python cli.py fit --resume {shlex.quote(str(run))} {rate}"
    return advice + (f", or from an earlier step: --resume {shlex.quote(str(earlier[-1]))}" if earlier else "")


def _copied_to_host(*scalars: Tensor) -> Outcome:
    """Start copying scalars from a device to the host, without waiting."""
    numbers = torch.stack([scalar.detach().float() for scalar in scalars])
    if not numbers.is_cuda:
        return Outcome(numbers, None)
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return Outcome(host, copied)
