"""Where the time of a training step goes: waiting for data, forward, backward, other processes, optimiser."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import lightning as L
import torch
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor
from torch.autograd import Variable

from zoo.train.callbacks.run_callback import RunCallback

PARTS = ("data", "forward", "backward", "optimizer", "other")


class Mark(Protocol):
    """A point in time, with the three methods of `torch.cuda.Event` that are used here."""

    def query(self) -> bool:
        """Whether the device has come so far."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to a later mark."""
        ...


class HostMark:
    """Now, by the clock of the host."""

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def query(self) -> bool:
        """It is past."""
        return True

    def elapsed_time(self, end_event: "HostMark") -> float:
        """Milliseconds from here to a later mark."""
        return 1000 * (end_event.seconds - self.seconds)


def mark(device: torch.device) -> Mark:
    """A mark at this point of what a device computes; nothing waits for it."""
    if device.type != "cuda":
        return HostMark()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def when_computed(loss: Tensor, do: Callable[[], None]) -> None:
    """Have `do` called in the backward pass of `loss`, when all gradients of this process are computed.

    What DDP does when it has all of them, to wait for those of the other processes, comes after that.
    """

    def queue(gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(do)  # in order; DDP queues its own at the last gradient

    loss.register_hook(queue)


class LoaderClock(Profiler):
    """Counts the seconds in which Lightning waits for the training loader, around the profiler that there is.

    (No hook of a callback comes before the loader is asked.)

    Args:
        inner: The trainer's own profiler, which hears of everything.
    """

    def __init__(self, inner: Profiler) -> None:
        super().__init__()
        self.inner = inner
        self.seconds = 0.0
        self._start = 0.0

    def start(self, action_name: str) -> None:
        """Note when the loader is asked."""
        self.inner.start(action_name)
        if action_name.endswith("train_dataloader_next"):
            self._start = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Note when it has answered."""
        if action_name.endswith("train_dataloader_next"):
            self.seconds += time.perf_counter() - self._start
        self.inner.stop(action_name)

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def summary(self) -> str:
        """The inner one's."""
        return self.inner.summary()

    def describe(self) -> None:
        """The inner one's."""
        self.inner.describe()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """The inner one's."""
        self.inner.setup(stage, local_rank, log_dir)

    def teardown(self, stage: str | None) -> None:
        """The inner one's."""
        self.inner.teardown(stage)


class _Batch(NamedTuple):
    before: Mark | None  # the end of the batch before it, if nothing but the loader came in between
    waited: float  # for the loader, seconds of the host
    marks: list[Mark]  # start, before and after the backward pass, end
    computed: Mark | None  # in the backward pass, when all gradients were computed, if others are then waited for


class StepTimes(RunCallback):
    """Logs the mean seconds per optimiser step of each part of it, over the steps since they were logged last.

    `seconds_forward`; `seconds_backward`, with the communication of gradients, most of which goes on beside it;
    `seconds_optimizer`, with the norm and clipping of the gradients; `seconds_data`, waiting for the loader; and
    `seconds_other`, all else between two steps, such as logging and checkpoints. Validation counts nowhere.

    Several processes with DDP have `seconds_communication`, too: the end of `seconds_backward`, when all gradients are
    computed and only those of other processes are waited for, on their way or not computed yet. It is the part of the
    communication that makes a step longer, apart from what context parallelism exchanges inside of layers. ZeRO has
    no such column: it communicates in all parts of a step, and there is no point after which it only waits.

    On a GPU these are seconds of the GPU, between events that are read when it has passed them: nothing waits for it,
    and the last steps may count the next time. The wait for the loader counts as far as the GPU waits too. The
    first step of a process, which compiles and allocates, does not count. All are of the first process.
    """

    order = 10  # first, so that what the others do is not taken for a part of the step

    def __init__(self) -> None:
        self._loader: LoaderClock | None = None
        self._step = 0  # those done
        self._warm = False
        self._before: Mark | None = None
        self._marks: list[Mark] = []  # of the batch in progress
        self._batches: list[_Batch] = []  # of the step in progress
        self._waiting: deque[list[_Batch]] = deque()  # steps that the device may not have done
        self._with_others = False  # whether gradients of other processes are waited for
        self._computed: Mark | None = None  # of the batch in progress
        self._forget()

    def _forget(self) -> None:
        parts = (*PARTS, "communication") if self._with_others else PARTS
        self._sums, self._steps = dict.fromkeys(parts, 0.0), 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Listen to how long the loader takes."""
        if stage == "fit":
            self._loader = LoaderClock(trainer.profiler)
            trainer.profiler = self._loader

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Give the trainer its profiler back."""
        if self._loader is not None and trainer.profiler is self._loader:
            trainer.profiler = self._loader.inner
        self._loader = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin anew."""
        self._step, self._warm, self._before = trainer.global_step, False, None
        self._batches.clear()
        self._waiting.clear()
        ddp = isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DeepSpeedStrategy)
        self._with_others = ddp and trainer.world_size > 1
        self._forget()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """What comes until the next batch is no part of a step."""
        self._before = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Mark the start of the forward pass."""
        self._marks, self._computed = [mark(pl_module.device)], None

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        """Mark its end, and later that of the gradients."""
        self._marks.append(mark(pl_module.device))

        def computed() -> None:
            self._computed = mark(pl_module.device)

        if self._with_others:
            when_computed(loss, computed)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Mark the end of the backward pass."""
        self._marks.append(mark(pl_module.device))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Mark the end of the batch, and log if it is time."""
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
        every = trainer.log_every_n_steps
        if every and self._step % every == 0:
            self._read()
            if self._steps:
                for part, seconds in self._sums.items():
                    self.log(f"seconds_{part}", seconds / self._steps)
                self._forget()

    def _read(self) -> None:
        """Add up the steps that the device has done."""
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
