"""Ends a run that hangs, and records where it hung."""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L

from kernels.errors import UserError
from zoo.files.atomic import atomic_write
from zoo.train.callbacks.run_callback import RunCallback

TIMED_OUT = 124  # the exit code of the `timeout` command


class Watchdog(RunCallback):
    """Ends the process if no step finishes within the timeout, and writes the stacks of all its threads to a file.

    The file is `hang-RANK.txt` in the run's folder, and the exit code 124; a scheduler can then resume the run from its
    last checkpoint. Validation batches and checkpoints count as steps. The first step may compile kernels.

    Args:
        timeout_minutes: Minutes to wait; null waits forever.

    Raises:
        UserError: `timeout_minutes` is not above 0.
    """

    key = "watchdog"
    order = 110

    def __init__(self, timeout_minutes: float | None = None) -> None:
        if timeout_minutes is not None and timeout_minutes <= 0:
            raise UserError(f"watchdog.timeout_minutes is {timeout_minutes}; it must be above 0, or null.")
        self.timeout_minutes = timeout_minutes
        self._last = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.timeout_minutes is None:
            return
        self._alive()
        self._stop.clear()
        file = Path(trainer.default_root_dir) / f"hang-{trainer.global_rank}.txt"
        self._thread = threading.Thread(target=self._watch, args=(file,), name="watchdog", daemon=True)
        self._thread.start()

    def _alive(self, *_: Any, **__: Any) -> None:
        """Note that something was finished."""
        self._last = time.monotonic()

    on_train_start = on_train_batch_end = on_validation_start = on_validation_batch_end = on_validation_end = _alive
    on_save_checkpoint = on_train_end = _alive

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self, file: Path) -> None:
        assert self.timeout_minutes is not None
        seconds = 60 * self.timeout_minutes
        while not self._stop.wait(min(1.0, seconds / 4)):
            if time.monotonic() - self._last > seconds:
                end_with_stacks(file, f"no step was finished for {self.timeout_minutes:g} minutes")
                return


def end_with_stacks(file: Path, reason: str) -> None:
    """End the process immediately with exit code 124, and write the stacks of all threads to `file`."""
    try:
        with atomic_write(file) as stacks:
            stacks.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}, process {os.getpid()}: {reason}\n".encode())
            stacks.flush()
            faulthandler.dump_traceback(stacks, all_threads=True)
        where = f"where it hung is in {file}"
    except OSError as error:  # a hanging or full disk may be the cause
        where = f"{file} cannot be written ({error.strerror})"
    sys.stderr.write(f"\nerror: {reason}; {where}\n")
    sys.stderr.flush()
    os._exit(TIMED_OUT)  # no clean-up: it would wait for what hangs
