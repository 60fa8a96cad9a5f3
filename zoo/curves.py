"""How the loss goes: `metrics.jsonl`, `metrics.csv` and `loss.png` in the run's folder."""

import csv
import functools
import io
import json
import logging
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from zoo.atomic import atomic_write

log = logging.getLogger(__name__)


class MetricsFile(Logger):
    """Appends each row of metrics to `metrics.jsonl`, at once; `step` is the index of the last finished step.

    A continued run appends. (Lightning's CSVLogger deletes the file of the run that is continued.) `metrics.csv`, the
    same with a column for each metric, is made of it after each validation and at the end.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.path = self.folder / "metrics.jsonl"

    @property
    def name(self) -> str:
        """The run's name."""
        return self.folder.name

    @property
    def version(self) -> str:
        """Runs have names, not versions."""
        return ""

    @property
    def save_dir(self) -> str:
        """The run's folder."""
        return str(self.folder)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """The run's folder has the whole config in a file of its own."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a row; values that are not finite become null."""
        self.folder.mkdir(parents=True, exist_ok=True)
        row = json.dumps({"step": step} | {name: finite(value) for name, value in metrics.items()})
        with open(self.path, "ab+") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                row = "\n" + row  # a killed process left half a row
            file.write(f"{row}\n".encode())
        if "val_loss" in metrics:
            self._write_csv()

    @rank_zero_only
    def make_up(self, metrics: dict[str, float], step: int) -> None:
        """Append a row unless it is there: a process may be killed between a checkpoint and the row of its step."""
        known = read_metrics(self.path) if self.path.is_file() else []
        if not any(row["step"] == step and metrics.keys() <= row.keys() for row in known):
            self.log_metrics(metrics, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Bring the CSV up to date, whatever ended the run."""
        if self.path.is_file():
            self._write_csv()

    def _write_csv(self) -> None:
        rows = read_metrics(self.path)
        columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        with suppress(OSError), atomic_write(self.path.with_suffix(".csv")) as file:  # the other file has it all
            file.write(text.getvalue().encode())


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl`: one row per step, in order.

    Steps that a continued run repeated, since they came after its checkpoint, are there once, as they were last. Lines
    that are no rows, such as the half one that a killed process left, are left out with a warning.
    """
    rows: dict[int, dict[str, Any]] = {}
    bad = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
                rows.setdefault(int(row["step"]), {}).update(row)
            except (ValueError, TypeError, KeyError, RecursionError):
                bad.append(number)
    if bad:
        listed = ", ".join(map(str, bad[:5])) + (" …" if len(bad) > 5 else "")
        log.warning("%s: %d lines are no rows of metrics, and left out: %s", path, len(bad), listed)
    return [rows[step] for step in sorted(rows)]


def finite(value: Any) -> Any:
    """Tensors as numbers, and None for what JSON cannot say."""
    value = value.item() if isinstance(value, torch.Tensor) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


class LossCurve(Callback):
    """Draws the training and validation loss over the tokens into `loss.png`, at each validation and at the end.

    Args:
        every_n_steps: Take the training loss each time that so many steps are done; reading it waits for the GPU.
        smoothing: Weight of the past in the smoothed training loss.
    """

    def __init__(self, every_n_steps: int = 10, smoothing: float = 0.6) -> None:
        self.every_n_steps = every_n_steps
        self.smoothing = smoothing
        self.training: list[tuple[int, float]] = []  # tokens, nats
        self.validation: list[tuple[int, float]] = []

    def state_dict(self) -> dict[str, Any]:
        """The points so far, so that a continued run draws the whole curve."""
        return {name: torch.tensor(getattr(self, name), dtype=torch.float64) for name in ("training", "validation")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the curve."""
        for name, points in state_dict.items():
            setattr(self, name, [(int(tokens), loss) for tokens, loss in points.tolist()])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a point of the training loss, as it was last logged: that of all processes."""
        tokens, loss = pl_module.tokens_seen, trainer.callback_metrics.get("train_loss")
        again = bool(self.training) and self.training[-1][0] == tokens
        if loss is not None and trainer.global_step % self.every_n_steps == 0 and not again:
            self.training.append((tokens, loss.item()))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take a point of the validation loss, and draw."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.complete(trainer, pl_module)

    def complete(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the point, unless it is there already."""
        if "val_loss" in trainer.callback_metrics:
            known = self.validation and self.validation[-1][0] == pl_module.tokens_seen
            if not known:
                self.validation.append((pl_module.tokens_seen, trainer.callback_metrics["val_loss"].item()))
            self._draw(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the complete curve."""
        self._draw(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Draw what there is of an interrupted run."""
        stopped = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        if stopped and trainer.state.fn == "fit" and self.training:  # before a step there may be no data yet, either
            self._draw(trainer)

    def figure(self, baseline: float | None = None) -> Figure:
        """The curve.

        Args:
            baseline: Loss of the interpolated bigram model in nats, drawn as a line; None draws none.
        """
        figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")  # not pyplot: no global state, no display
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(xlabel="tokens", ylabel="loss (nats per token)")
        if self.training:
            tokens, losses = zip(*self.training, strict=True)
            axes.plot(tokens, losses, color="tab:blue", alpha=0.25, linewidth=1, label="training")
            axes.plot(tokens, _smooth(losses, self.smoothing), color="tab:blue", label="training, smoothed")
        if self.validation:
            axes.plot(*zip(*self.validation, strict=True), color="tab:orange", marker="o", label="validation")
        if baseline is not None:
            axes.axhline(baseline, color="gray", linestyle="--", label="interpolated bigram model")
        if axes.has_data():
            axes.legend()
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(alpha=0.3)
        return figure

    def _draw(self, trainer: L.Trainer) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        with atomic_write(Path(trainer.default_root_dir) / "loss.png") as file:
            self.figure(bigram_loss(trainer)).savefig(file, format="png")


def _smooth(values: Iterable[float], weight: float) -> list[float]:
    """Exponential mean, corrected for its start."""
    smoothed, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        smoothed.append(total / norm)
    return smoothed


def bigram_loss(trainer: L.Trainer) -> float | None:
    """The data module's bigram baseline in nats per token; None if it has none."""
    return _bigram_loss(trainer.datamodule)


@functools.lru_cache(maxsize=1)  # it counts all training tokens
def _bigram_loss(datamodule: L.LightningDataModule | None) -> float | None:
    measure = getattr(datamodule, "bigram_loss", None)
    return None if measure is None else float(measure())
