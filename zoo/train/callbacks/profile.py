"""A profile of a few steps of a run, operation by operation."""

import gzip
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from kernels.errors import UserError
from zoo.files.atomic import atomic_write
from zoo.train.callbacks.run_callback import RunCallback

ROWS = 40  # in the table


class Profile(RunCallback):
    """Profiles some steps of the first process with PyTorch's profiler, into `profile/` in the run's folder.

    `trace.json.gz` is a time line for https://ui.perfetto.dev or chrome://tracing, `table.txt` lists the slowest
    operations. Recorded steps are slower; those before and after are not affected.

    Args:
        steps: Number of steps to record; 0 records nothing.
        after: Number of steps of this process to skip first; the last of them warms the profiler up.

    Raises:
        UserError: An argument is out of range.
    """

    key = "profile"
    order = 160

    def __init__(self, steps: int = 0, after: int = 5) -> None:
        if steps < 0 or after < 1:
            raise UserError(f"profile: steps is {steps} and after {after}; they must be at least 0 and 1.")
        self.steps, self.after = steps, after
        self._profiler: profile | None = None
        self._step = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        if not self.steps or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        activities, on_gpu = [ProfilerActivity.CPU], pl_module.device.type == "cuda"
        if on_gpu:
            activities.append(ProfilerActivity.CUDA)
        folder = Path(trainer.default_root_dir) / "profile"
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=self.after - 1, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=lambda recording: write_profile(recording, folder, "device" if on_gpu else "cpu"),
            acc_events=True,
        )
        self._profiler.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Advance the profiler, which writes when the last step is recorded."""
        if self._profiler is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._profiler.step()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the steps recorded so far, if the run was too short."""
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write the steps recorded so far, if possible."""
        with suppress(OSError, RuntimeError):  # the exception that ended the run is reported instead
            self._stop()

    def _stop(self) -> None:
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            profiler.stop()


def write_profile(recording: profile, folder: Path, device: str) -> None:
    """Write the time line and the table, sorted by the time of `cpu` or `device`, of a stopped profiler to a folder."""
    if device == "device":
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as temporary:
        trace = Path(temporary) / "trace.json"
        recording.export_chrome_trace(str(trace))
        with atomic_write(folder / "trace.json.gz") as file:
            file.write(gzip.compress(trace.read_bytes()))
    table = recording.key_averages().table(
        sort_by=f"self_{device}_time_total", row_limit=ROWS, max_name_column_width=80
    )
    with atomic_write(folder / "table.txt") as file:
        file.write(table.encode())
