"""Metrics as files: `metrics.jsonl` and `metrics.csv` in the run's folder."""

import csv
import io
import json
import logging
import math
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from zoo.display import short_list
from zoo.files.atomic import atomic_write
from zoo.files.links import open_in_place
from zoo.train.results import is_number

log = logging.getLogger(__name__)


class MetricsFile(Logger):
    """Appends each row of metrics to `metrics.jsonl` in a folder; `step` is the index of the last finished step.

    A resumed run appends. (Lightning's CSVLogger deletes the file of the run being resumed.) `metrics.csv`, the same
    rows with a column for each metric, is written from it after each validation and at the end.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.path = self.folder / "metrics.jsonl"

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def version(self) -> str:
        """Runs have names, not versions."""
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Do nothing: the whole config is in the run's `config.yaml`."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append a row; non-finite values become null."""
        self.folder.mkdir(parents=True, exist_ok=True)
        row = json.dumps({"step": step} | {name: finite(value) for name, value in metrics.items()})
        with open_in_place(self.path, "ab+") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                row = "\n" + row  # a killed process left half a row
            file.write(f"{row}\n".encode())
        if "val_loss" in metrics:
            self._write_csv()

    @rank_zero_only
    def make_up(self, metrics: dict[str, float], step: int) -> None:
        """Append a row if it is missing: a process may be killed between a checkpoint and the row of its step."""
        written = read_metrics(self.path) if self.path.is_file() else []
        if not any(row["step"] == step and metrics.keys() <= row.keys() for row in written):
            self.log_metrics(metrics, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Bring the CSV up to date, however the run ended."""
        if self.path.is_file():
            self._write_csv()

    def _write_csv(self) -> None:
        rows = read_metrics(self.path)
        columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        with suppress(OSError), atomic_write(self.path.with_suffix(".csv")) as file:  # metrics.jsonl has everything
            file.write(text.getvalue().encode())


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl`: one row per step, in order.

    A step that a resumed run repeated, since it came after the checkpoint, appears once, with its latest values. Lines
    that are not rows, such as a half-written one of a killed process, are skipped with a warning.
    """
    if not Path(path).is_file():
        log.warning("%s: there is none, as of a run with trainer.logger=false", path)
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        rows, bad = parse_metrics(file)
    if bad:
        log.warning(
            "%s: %d lines are not rows of metrics and were skipped: %s",
            path,
            len(bad),
            short_list(map(str, bad), separator=", "),
        )
    return rows


def parse_metrics(lines: Iterable[str]) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the rows of a `metrics.jsonl`, as `read_metrics` does, and the numbers of the lines that are not rows."""
    rows: dict[int, dict[str, Any]] = {}
    bad = []
    for number, line in enumerate(lines, start=1):
        try:
            row = _parse_row(line)
            rows.setdefault(row["step"], {}).update(row)
        except (ValueError, RecursionError):
            bad.append(number)
    return [rows[step] for step in sorted(rows)], bad


def _parse_row(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict) or not is_number(row.get("step")) or row["step"] < 0 or row["step"] % 1:
        raise ValueError("a row has a step, which is a whole number from 0")
    row = {name: finite(value) for name, value in row.items()}
    if not all(value is None or is_number(value) for value in row.values()):
        raise ValueError("a row holds numbers")
    return {**row, "step": int(row["step"])}


def finite(value: Any) -> Any:
    """A tensor as a number; None for a non-finite number, which JSON cannot represent."""
    value = value.item() if isinstance(value, torch.Tensor) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
