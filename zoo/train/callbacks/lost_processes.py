"""Names the process whose death ended a run: a data worker, or the process of another device."""

import multiprocessing.process
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

import lightning as L

from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.lightning_internals import stop_child_process_observer

WORKER = re.compile(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (?:is killed by signal: (.+?)\.|exited unexpectedly)")
CONNECTION = re.compile(
    r"Connection (closed|reset) by|Broken pipe|ncclRemoteError|remote process exited", re.IGNORECASE
)
POLL, ENDING = 0.2, 2.0  # seconds: between two looks at the other processes; for a process that is ending
KILLED = 'usually because the machine ran out of memory (`dmesg` then says "Out of memory")'


class LostProcesses(RunCallback):
    """Finds the process whose death is behind an exception, and ends a run that would wait for it for ever.

    When a process of another device ends, Gloo raises an error without the reason, and NCCL waits. So a thread of the
    first process watches the others. Lightning has such a thread as well, which kills all processes without a message;
    it is switched off.

    Attributes:
        reason: Which process died and what that usually means, once an exception was due to it; None otherwise.
    """

    order = 15  # before those that would wait for other processes

    def __init__(self) -> None:
        self.reason: str | None = None
        self._stop = threading.Event()
        self._advice = ""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Watch the processes that Lightning has started."""
        self._stop.clear()
        self._advice = f"; fit --resume {trainer.default_root_dir} continues from the last checkpoint"
        if others := _others(trainer):
            stop_child_process_observer()
            threading.Thread(target=self._watch, args=(others,), name="lost-processes", daemon=True).start()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Find out whether a process has died, while its data loader still knows it."""
        self._stop.set()
        if reason := _lost_worker(exception) or _lost_rank(trainer, exception):
            self.reason = f"{reason}{self._advice}."

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop.set()

    def _watch(self, others: Sequence["subprocess.Popen[Any]"]) -> None:
        while not self._stop.wait(POLL):
            if (reason := _ended(others)) is not None and not self._stop.wait(ENDING):
                for process in others:
                    process.kill()
                sys.stderr.write(f"\nerror: {reason}{self._advice}.\n")
                sys.stderr.flush()
                os._exit(max(2, *(process.returncode or 0 for process in others)))  # a clean-up might wait for ever


def _others(trainer: L.Trainer) -> list["subprocess.Popen[Any]"]:
    return list(getattr(trainer.strategy.launcher, "procs", ()))


def _lost_worker(exception: BaseException) -> str | None:
    """The data worker whose death interrupted this process, which may raise any exception then."""
    matches = (WORKER.search(str(error)) for error in _chain(exception))
    if match := next((candidate for candidate in matches if candidate), None):
        number, killed_by = match[1], match[2]
    # PyTorch raises its error in a signal handler, where C code may replace it by another error, and only once
    elif killed := [worker for worker in _data_workers() if (worker.exitcode or 0) < 0]:
        number, killed_by = killed[0].pid, signal.strsignal(-(killed[0].exitcode or 0))
    else:
        return None
    end = f"was killed (signal {killed_by})" if killed_by else "ended unexpectedly"
    return f"data.num_workers: the data worker with process id {number} {end}, {KILLED}; set fewer workers"


def _data_workers() -> list[BaseProcess]:
    """The worker processes that were not joined; `multiprocessing.active_children` leaves out those that have ended."""
    return [process for process in multiprocessing.process._children if process.daemon]  # type: ignore[attr-defined]


def _lost_rank(trainer: L.Trainer, exception: BaseException) -> str | None:
    """The process of another device whose death closed a connection."""
    if trainer.world_size == 1 or not any(CONNECTION.search(str(error)) for error in _chain(exception)):
        return None
    others = _others(trainer)
    for process in others:
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDING / len(others))
    return _ended(others) or (
        f"trainer.devices: the process with rank {trainer.global_rank} lost its connection to another process of the "
        f"run, which ended or was killed, {KILLED}; the output of the others says more"
    )


def _ended(others: Sequence["subprocess.Popen[Any]"]) -> str | None:
    """The first of some processes that ended by a signal or with an error."""
    for rank, process in enumerate(others, start=1):
        if code := process.poll():
            names = {number.value: number.name for number in signal.Signals}
            by_signal = f"was killed by {names.get(-code, f'signal {-code}')}, {KILLED}" if code < 0 else ""
            end = by_signal or f"ended with exit code {code}; what it wrote says why"
            return f"trainer.devices: the process of rank {rank} (process id {process.pid}) {end}"
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and those behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
