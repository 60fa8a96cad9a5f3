"""The loss over tokens, plotted in `loss.png`."""

import logging
import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from torch import Tensor

from kernels.errors import UserError
from zoo.checkpoints.background import Background
from zoo.display import new_figure, write_figure
from zoo.train.callbacks.result_row import bigram_loss
from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.history import Change, read_history

log = logging.getLogger(__name__)

MAX_UNREAD = 100
SMOOTHING = 0.6  # weight of the past in the smoothed training loss


class LossCurve(RunCallback):
    """Plots the training and validation loss over tokens in `loss.png`, at each validation and at the end.

    A thread measures the bigram model and draws the picture while training continues; the end of the run waits for it.

    Args:
        every_n_steps: Record the training loss every N steps.

    Raises:
        UserError: An argument is out of range.
    """

    key = "loss_curve"
    order = 140

    def __init__(self, every_n_steps: int = 10) -> None:
        if every_n_steps < 1:
            raise UserError(f"loss_curve: every_n_steps is {every_n_steps}; it must be at least 1.")
        self.every_n_steps = every_n_steps
        self.training: list[tuple[int, float]] = []  # tokens, nats
        self.validation: list[tuple[int, float]] = []
        self._unread: list[tuple[int, Tensor]] = []  # training losses that a GPU may not have computed yet
        self._step = 0  # the last one recorded
        self._drawn: tuple[int, int] | None = None  # number of points
        self._background = Background()

    def state_dict(self) -> dict[str, Any]:
        """The points so far, so that a resumed run draws the whole curve."""
        self._read()
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("training", "validation")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, points in state_dict.items():
            setattr(self, name, [(int(tokens), loss) for tokens, loss in points.tolist()])

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Record the training loss, which covers all processes."""
        step, loss = trainer.global_step, pl_module.train_loss
        if loss is None or step % self.every_n_steps or step == self._step:  # a step can have several batches
            return
        self._step = step
        self._unread.append((pl_module.tokens_seen, loss.detach().clone()))
        if len(self._unread) == MAX_UNREAD:
            self._read()

    def _read(self) -> None:
        """Wait for the recorded training losses."""
        if self._unread:
            tokens, losses = zip(*self._unread, strict=True)
            self.training += zip(tokens, torch.stack(losses).tolist(), strict=True)
            self._unread = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the validation loss, and draw the curve."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._record(trainer, pl_module)

    def complete(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the validation loss, and draw the curve."""
        self._record(trainer, pl_module)
        self._background.wait()

    def _record(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the validation loss unless it is recorded already, and draw the curve."""
        if "val_loss" in trainer.callback_metrics:
            recorded = self.validation and self.validation[-1][0] == pl_module.tokens_seen
            if not recorded:
                self.validation.append((pl_module.tokens_seen, trainer.callback_metrics["val_loss"].item()))
            self._draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._draw(trainer)
        self._background.wait()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Draw the curve of an interrupted run so far."""
        stopped = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        # before the first step the data may not be ready, which the baseline needs
        if stopped and trainer.state.fn == "fit" and (self.training or self._unread):
            self._draw(trainer)
            self._background.wait()

    def figure(self, baseline: float | None = None, changes: Sequence[Change] = ()) -> Figure:
        """The curve.

        Args:
            baseline: Loss of the interpolated bigram model in nats, drawn as a line; None draws none.
            changes: Settings that were changed on the way, each drawn as a line where it was.
        """
        figure = new_figure(7, 4.2, dpi=120)
        axes = figure.add_subplot(xlabel="tokens", ylabel="loss (nats per token)")
        if self.training:
            tokens, losses = zip(*self.training, strict=True)
            if len(tokens) > 1:  # a line needs two points
                axes.plot(tokens, losses, color="tab:blue", alpha=0.25, linewidth=1, label="training")
            marker, label = (None, "training, smoothed") if len(tokens) > 1 else ("o", "training")
            axes.plot(tokens, _smooth(losses, SMOOTHING), color="tab:blue", marker=marker, label=label)
        if self.validation:
            axes.plot(*zip(*self.validation, strict=True), color="tab:orange", marker="o", label="validation")
        if baseline is not None:
            axes.axhline(baseline, color="gray", linestyle="--", label="interpolated bigram model")
        for number, change in enumerate(changes):
            axes.axvline(change.tokens, color=f"C{number + 2}", linestyle=":", label=str(change).replace("$", r"\$"))
        if axes.has_data():
            axes.legend()
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        return figure

    def _draw(self, trainer: L.Trainer) -> None:
        self._read()
        points = len(self.training), len(self.validation)
        if not trainer.is_global_zero or trainer.fast_dev_run or points == self._drawn:
            return
        self._background.wait()
        self._drawn = points
        self._background.add(partial(self._write, trainer.datamodule, Path(trainer.default_root_dir) / "loss.png"))

    def _write(self, datamodule: L.LightningDataModule | None, file: Path) -> None:
        try:
            changes = [change for change in read_history(file.parent) if change.key.startswith("optim.")]
        except UserError as error:  # damaged since the run began
            log.warning("%s", error)
            changes = []
        write_figure(self.figure(bigram_loss(datamodule), changes), file)


def _smooth(values: Iterable[float], weight: float) -> list[float]:
    """Exponential moving average with bias correction; a value that is not finite is a gap and changes no other."""
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        if not math.isfinite(value):
            smoothed.append(math.nan)
            continue
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed
