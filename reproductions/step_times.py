"""Time of each part of a training step: waiting for data, forward, backward, other processes, optimiser.

python cli.py fit --config gated_deltanet.yaml --trainer.callbacks+=reproductions.step_times.StepTimes
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor
from torch.autograd import Variable

from kernels import is_deterministic

PARTS = ("data", "forward", "backward", "optimizer", "other")


class HostMark:
    """The current time, by the clock of the host, with the methods of `torch.cuda.Event` that are used here."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        """Return whether the device has reached the mark."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to a later mark."""
        return 1000 * (end_event.seconds - self.seconds)


Mark = Any  # a HostMark, or a torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """A mark at this point of a device's work, without synchronisation."""
    if device.type != "cuda":
        return HostMark()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def when_computed(loss: Tensor, do: Callable[[], None]) -> None:
    """Call `do` in the backward pass of `loss`, when all gradients of this process are computed.

    DDP's wait for the gradients of the other processes comes after that.
    """

    def queue(gradient: Tensor) -> None:
        # callbacks run in order, and DDP queues its wait at the last gradient
        Variable._execution_engine.queue_callback(do)

    loss.register_hook(queue)


class LoaderClock(Profiler):
    """A trainer's profiler, and the seconds of waiting for the training loader, by what Lightning tells profilers.

    (No callback hook comes before the loader is called.)
    """

    def __init__(self, profiler: Profiler) -> None:
        super().__init__()
        self.profiler = profiler
        self.seconds = self._began = 0.0

    def start(self, action_name: str) -> None:
        self.profiler.start(action_name)
        if action_name.endswith("train_dataloader_next"):
            self._began = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.seconds += time.perf_counter() - self._began
        self.profiler.stop(action_name)

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.profiler.setup(stage, local_rank, log_dir)

    def teardown(self, stage: str | None) -> None:
        self.profiler.teardown(stage)

    def summary(self) -> str:
        return self.profiler.summary()

    def describe(self) -> None:
        self.profiler.describe()

    def __del__(self) -> None:
        """Lightning's would end the profiler, which is used after this object."""


class _Batch(NamedTuple):
    before: Mark | None  # end of the previous batch, if only the loader came in between
    waited: float  # host seconds spent waiting for the loader
    marks: list[Mark]  # start, before and after the backward pass, end
    computed: Mark | None  # when all local gradients were computed, if those of other processes are then waited for


class StepTimes(Callback):
    """Logs the mean seconds of each part of an optimiser step, over the steps since the last log.

    `seconds_forward`; `seconds_backward`, with the communication of gradients, most of which overlaps it;
    `seconds_optimizer`, with the norm and clipping of the gradients; `seconds_data`, waiting for the loader; and
    `seconds_other`, everything else between two steps, such as logging and checkpoints. Validation is not counted.

    With DDP on several processes there is also `seconds_communication`: the end of `seconds_backward`, after all local
    gradients are computed, when the process only waits for those of others. It is the part of the communication that
    is not overlapped, apart from what context parallelism exchanges inside layers. ZeRO has no such column: it
    communicates in all parts of a step, and never only waits.

    On a GPU these are seconds of the GPU, between events that are read once it has passed them: nothing synchronises,
    and the last steps may count towards the next log. Waiting for the loader counts only as far as the GPU waits too.
    The first step of a process, which compiles and allocates, does not count. All numbers are of the first process.
    Callbacks of `trainer.callbacks` run before the project's own, whose time therefore counts towards `seconds_other`.
    Since they may read metrics, several processes add up the loss in each step, not in logged ones alone.
    """

    def __init__(self) -> None:
        self._loader: LoaderClock | None = None
        self._step = 0  # steps done
        self._warm = False
        self._before: Mark | None = None
        self._marks: list[Mark] = []  # of the batch in progress
        self._batches: list[_Batch] = []  # of the step in progress
        self._waiting: deque[list[_Batch]] = deque()  # steps that the device may not have finished
        self._with_others = False  # whether the backward pass waits for gradients of other processes
        self._computed: Mark | None = None  # of the batch in progress
        self._reset()

    def _reset(self) -> None:
        parts = (*PARTS, "communication") if self._with_others else PARTS
        self._sums, self._steps = dict.fromkeys(parts, 0.0), 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._loader = trainer.profiler = LoaderClock(trainer.profiler)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._loader is not None and trainer.profiler is self._loader:
            trainer.profiler = self._loader.profiler
        self._loader = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step, self._warm, self._before = trainer.global_step, False, None
        self._batches.clear()
        self._waiting.clear()
        ddp = isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DeepSpeedStrategy)
        # deterministic mode waits for the gradients of others after each part of a step
        self._with_others = ddp and trainer.world_size > 1 and not is_deterministic()
        self._reset()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The time until the next batch does not belong to a step."""
        self._before = None

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._marks, self._computed = [mark(pl_module.device)], None

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Mark the end of the forward pass and, with DDP, when all gradients are computed."""
        self._marks.append(mark(pl_module.device))

        def computed() -> None:
            self._computed = mark(pl_module.device)

        if self._with_others:
            when_computed(loss, computed)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._marks.append(mark(pl_module.device))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """Mark the end of the batch, and log if it is due."""
        end = mark(pl_module.device)
        waited = 0.0 if self._loader is None else self._loader.take()
        if len(self._marks) == 3:
            self._batches.append(_Batch(self._before, waited, [*self._marks, end], self._computed))
        self._before = end
        if trainer.global_step == self._step:
            return  # gradients are still being accumulated
        self._step = trainer.global_step
        if self._warm:
            self._waiting.append(self._batches)
        self._batches, self._warm = [], True
        interval = trainer.log_every_n_steps
        if interval and self._step % interval == 0:
            self._read()
            if self._steps:
                for part, seconds in self._sums.items():
                    self.log(f"seconds_{part}", seconds / self._steps)
                self._reset()

    def _read(self) -> None:
        """Add up the steps that the device has finished."""
        while self._waiting and all(batch.marks[-1].query() for batch in self._waiting[0]):
            for before, waited, (start, forward, backward, end), computed in self._waiting.popleft():
                gap = waited if before is None else before.elapsed_time(start) / 1000
                self._sums["data"] += min(waited, gap)
                self._sums["other"] += gap - min(waited, gap)
                self._sums["forward"] += start.elapsed_time(forward) / 1000
                self._sums["backward"] += forward.elapsed_time(backward) / 1000
                if computed is not None:
                    self._sums["communication"] += computed.elapsed_time(backward) / 1000
                self._sums["optimizer"] += backward.elapsed_time(end) / 1000
            self._steps += 1
