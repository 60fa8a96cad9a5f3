"""The progress of several runs at a time, from the metrics that they write."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from tqdm import tqdm

from zoo.display import progress_bar
from zoo.experiments.definition import Run

REFRESH_SECONDS = 1.0
MAX_NAME = 32  # characters of a name
TAIL = 1 << 14  # bytes at the end of metrics.jsonl, which hold at least one whole row


class _Shown(NamedTuple):
    run: Run
    bar: "tqdm[Any]"

    @property
    def steps(self) -> int | None:
        """The steps of the whole run; None if they are not limited."""
        most = -1 if self.run.parsed is None else self.run.parsed.trainer.max_steps
        return most if most > 0 else None


class RunBars:
    """A bar over all runs and, on a terminal, one below it for each that is in progress: its step, loss and time left.

    Args:
        folder: The folder of the runs.
        runs: All runs.
        done: Number of those that are complete.
    """

    def __init__(self, folder: Path, runs: Sequence[Run], done: int):
        self._width = min(max((len(run.name) for run in runs), default=0), MAX_NAME)
        self._folder, self._failed, self._due = folder, 0, 0.0
        self._running: dict[str, _Shown] = {}
        options = {"bar_format": "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"} if sys.stderr.isatty() else {}
        self._all = progress_bar(total=len(runs), initial=done, desc="runs", unit="", **options)
        self._say()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self._running.pop(name).bar.close()
        self._all.close()

    def start(self, run: Run) -> None:
        """Add a run."""
        form = "  {desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"
        name = run.name if len(run.name) <= MAX_NAME else f"{run.name[: MAX_NAME - 1]}…"
        hidden = not sys.stderr.isatty()  # the bar over all runs says it
        shown = _Shown(run, progress_bar(desc=name.ljust(self._width), leave=False, bar_format=form, disable=hidden))
        shown.bar.total = shown.steps
        shown.bar.set_postfix_str(_in_words(None))
        self._running[run.name] = shown

    def end(self, run: Run, failed: bool) -> None:
        """Remove a run that has ended."""
        self._running.pop(run.name).bar.close()
        self._failed += failed
        self._all.update()
        self._say()

    def refresh(self) -> None:
        """Show where the runs are now, at most once a second."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + REFRESH_SECONDS
        for name, shown in self._running.items():
            row = _latest(self._folder / name / "metrics.jsonl")
            shown.bar.n = row["step"] + 1 if row else 0
            shown.bar.set_postfix_str(_in_words(row))
        self._say()

    def write(self, text: str) -> None:
        """Write a line above the bars."""
        self._all.write(text)

    def _say(self) -> None:
        parts = [f"{self._failed} failed"] if self._failed else []
        if not sys.stderr.isatty():
            for name, shown in self._running.items():
                row = _latest(self._folder / name / "metrics.jsonl")
                step = f"step {row['step'] + 1} of {shown.steps or '?'}, " if row else ""
                parts.append(f"{name}: {step}{_in_words(row)}")
        self._all.set_postfix_str("; ".join([*parts, f"logs: {self._folder}/NAME.log"]))


def _latest(file: Path) -> dict[str, Any] | None:
    """The last row with a training loss; None without one."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        opened.seek(max(opened.seek(0, os.SEEK_END) - TAIL, 0))
        for line in reversed(opened.read().splitlines()):
            with contextlib.suppress(ValueError):  # half a row
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int) and "train_loss" in row:
                    return row
    return None


def _in_words(row: dict[str, Any] | None) -> str:
    if row is None:
        return "starting"
    loss, minutes = row["train_loss"], row.get("minutes_left")
    said = "loss not finite" if loss is None else f"loss {loss:.3f}"
    if minutes is None:
        return said
    return f"{said}, validating" if minutes == 0 else f"{said}, {max(minutes, 1):.0f} min left"
