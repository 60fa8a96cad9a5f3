"""A run that hangs ends with a code that says so, and a file that says where."""

import subprocess
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest

from kernels.errors import UserError
from tests.forked_python import forked_python
from tests.zoo.tiny import ResumableLoader, pretraining, trainer, validation_loader
from zoo.train.callbacks.watchdog import Watchdog

HANGING = """
    import sys, time
    sys.path.insert(0, {here!r})
    from pathlib import Path
    import lightning as L
    from tests.zoo.tiny import ResumableLoader, pretraining, trainer, validation_loader
    from zoo.train.callbacks import watchdog
    from zoo.train.callbacks.watchdog import Watchdog

    class Clock:  # that stands still until something hangs, however slow this machine is
        now, strftime = 0.0, time.strftime
        monotonic = lambda self: self.now

    clock = Clock()
    watchdog.time = clock

    class Hang(L.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            if trainer.global_step == 4:
                wait_for_nobody()

    def wait_for_nobody():
        clock.now = 2.0
        time.sleep(3600)

    callbacks = [Watchdog(timeout_minutes=1.5 / 60), Hang()]
    trainer(Path({folder!r}), callbacks).fit(pretraining(), ResumableLoader(40), validation_loader())
"""


@pytest.mark.slow
def test_a_run_that_hangs_ends_and_says_where(tmp_path: Path):
    here = Path(__file__).parents[4]
    (tmp_path / "program.py").write_text(textwrap.dedent(HANGING.format(here=str(here), folder=str(tmp_path))))
    # it does not wait for the end of what hangs
    command = [forked_python(), str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=600)
    assert done.returncode == 124, done.stderr  # that of the command `timeout`
    stacks = (tmp_path / "hang-0.txt").read_text()
    assert "wait_for_nobody" in stacks
    assert "no step was finished for 0.025 minutes" in stacks
    assert f"error: no step was finished for 0.025 minutes; where it hung is in {tmp_path}/hang-0.txt" in done.stderr
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()


class Clock:
    """A clock that stands still but for `take`, which lets the watching thread look at it before it returns."""

    def __init__(self) -> None:
        self.now, self.looked = 0.0, threading.Event()

    def monotonic(self) -> float:
        if threading.current_thread().name == "watchdog":
            self.looked.set()
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(2):  # the first look may have begun before
            self.looked.clear()
            assert self.looked.wait(60), "the watching thread has ended"


class Slow(L.Callback):
    """Batches of training and of validation that take some seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.clock.take(self.seconds)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.clock.take(self.seconds)


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Longer than the time, with no step longer than it."""
    ended, clock = [], Clock()
    monkeypatch.setattr("zoo.train.callbacks.watchdog.end_with_stacks", lambda file, reason: ended.append(reason))
    monkeypatch.setattr("zoo.train.callbacks.watchdog.time", clock)
    callbacks = [Watchdog(timeout_minutes=0.04 / 60), Slow(clock, 0.03)]
    trainer(tmp_path, callbacks, max_steps=8).fit(pretraining(), ResumableLoader(40), validation_loader())
    assert clock.now > 0.2
    assert not ended
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_a_step_that_takes_longer_than_the_time_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ended, clock = [], Clock()

    def end(file: Path, reason: str) -> None:
        ended.append((file.name, reason))
        clock.looked.set()

    monkeypatch.setattr("zoo.train.callbacks.watchdog.end_with_stacks", end)
    monkeypatch.setattr("zoo.train.callbacks.watchdog.time", clock)
    watchdog = Watchdog(timeout_minutes=0.04 / 60)
    watchdog.on_fit_start(SimpleNamespace(default_root_dir=tmp_path, global_rank=3), None)
    clock.take(0.04)
    assert not ended
    clock.now += 0.001
    watchdog._thread.join(60)
    assert ended == [("hang-3.txt", "no step was finished for 0.000666667 minutes")]


def test_it_is_off_by_default(tmp_path: Path):
    class Look(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            assert not any(thread.name == "watchdog" for thread in threading.enumerate())

    trainer(tmp_path, [Watchdog(), Look()], max_steps=2).fit(pretraining(), ResumableLoader(40), validation_loader())


def test_the_time_is_above_zero():
    with pytest.raises(UserError, match="above 0"):
        Watchdog(timeout_minutes=0)
