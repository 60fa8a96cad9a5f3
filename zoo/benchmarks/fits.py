"""Running `fit` in separate processes, and reading the results of their runs."""

import math
import os
import re
import signal
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch.callbacks import Callback

from zoo.runs.command import COMMAND
from zoo.train.callbacks.step_times import PARTS
from zoo.train.metrics_file import read_metrics

# the last line of a traceback, or the line of a UserError
REASON = re.compile(r"(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception)|error): .+)")
LONGEST = 160  # characters of a reason, at most


class Unsaved(Callback):
    """Disables checkpoints, which for a large model would take longer than the steps, and fill the disk."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replace `save_checkpoint` by a function that does nothing."""
        trainer.save_checkpoint = lambda *_, **__: None


class Outcome(NamedTuple):
    """The results of a run.

    Attributes:
        losses: `train_loss` of the logged steps, in nats; nan where it is not finite.
        numbers: Speed and memory; empty for a failed run.
        note: Why the run failed.
    """

    losses: list[float]
    numbers: dict[str, Any]
    note: str | None = None


def run(folder: Path, arguments: Sequence[str], threads: str) -> int:
    """Train in `folder`, with the output in `folder.log`, and return the exit code.

    No process of the run outlives the call, however that ends.

    Args:
        folder: The run's folder.
        arguments: The command line, starting with the verb.
        threads: `OMP_NUM_THREADS` of each process.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    environment.pop("ZOO_RUN", None)
    command = [*COMMAND, *arguments, "--run", folder.as_posix()]
    with folder.with_name(f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            return process.wait()
        finally:
            if os.name == "nt":
                process.kill()
            else:
                with suppress(ProcessLookupError, PermissionError):  # all have ended
                    os.killpg(process.pid, signal.SIGKILL)  # with its child processes
            process.wait()


def outcome(folder: Path, code: int, warm_up: int, interval: int, on_gpu: bool) -> Outcome:
    """Read the results of a run.

    Args:
        folder: The run's folder.
        code: Its exit code.
        warm_up: Steps that do not count.
        interval: Steps between two rows of metrics.
        on_gpu: Whether the memory in the metrics is GPU memory.
    """
    if code:
        return Outcome([], {}, reason(folder.with_name(f"{folder.name}.log"), code))
    rows = read_metrics(folder / "metrics.jsonl")
    losses = [math.nan if (loss := row["train_loss"]) is None else loss for row in rows if "train_loss" in row]
    timed = [row for row in rows if f"seconds_{PARTS[0]}" in row and row["step"] + 1 - interval >= warm_up]
    if not timed:
        return Outcome(losses, {}, "no step was timed")
    seconds = statistics.median(sum(row[f"seconds_{part}"] for part in PARTS) for row in timed)
    tokens = timed[-1]["tokens"] / (timed[-1]["step"] + 1)
    numbers = {
        "tokens_per_second": tokens / seconds,
        "step_ms": 1e3 * seconds,
        "parts_ms": {part: _median_ms(timed, f"seconds_{part}") for part in PARTS},
        "communication_ms": _median_ms(timed, "seconds_communication"),
        "peak_gib": max((row["peak_memory_gib"] for row in timed), default=None) if on_gpu else None,
    }
    return Outcome(losses, numbers)


def _median_ms(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """The median of a metric in seconds, in milliseconds; None if it is not logged."""
    seconds = [row[name] for row in rows if name in row]
    return 1e3 * statistics.median(seconds) if seconds else None


def reason(log: Path, code: int) -> str:
    """Why a run failed: the last error in its log, or the last out-of-memory error, which may have caused others."""
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [match[1] for line in lines if (match := REASON.match(line))]
    of_memory = [line for line in errors if "OutOfMemory" in line]
    message = next(reversed(of_memory or errors or lines), "its log is empty")
    return f"exit code {code}: {message[:LONGEST]}{' …' * (len(message) > LONGEST)}"
