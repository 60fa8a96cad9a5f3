"""A run that hangs ends with a code that says so, and a file that says where."""

import subprocess
import textwrap
import threading
import time
from pathlib import Path

import lightning as L
import pytest

from kernels.errors import UserError
from tests.forked_python import forked_python
from tests.zoo.tiny import ResumableLoader, pretraining, trainer, validation_loader
from zoo.train.callbacks.watchdog import TIMED_OUT, Watchdog

HANGING = """
    import sys, time
    sys.path.insert(0, {here!r})
    from pathlib import Path
    import lightning as L
    from tests.zoo.tiny import ResumableLoader, pretraining, trainer, validation_loader
    from zoo.train.callbacks.watchdog import Watchdog

    class Hang(L.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            if trainer.global_step == 4:
                wait_for_nobody()

    def wait_for_nobody():
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
    assert done.returncode == TIMED_OUT, done.stderr
    stacks = (tmp_path / "hang-0.txt").read_text()
    assert "wait_for_nobody" in stacks
    assert "no step was finished for 0.025 minutes" in stacks
    assert f"error: no step was finished for 0.025 minutes; where it hung is in {tmp_path}/hang-0.txt" in done.stderr
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()


@pytest.mark.slow
def test_a_run_that_goes_on_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Longer than the time, with no step longer than it."""
    ended = []
    monkeypatch.setattr("zoo.train.callbacks.watchdog.end_with_stacks", lambda file, reason: ended.append(reason))

    class Slow(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            assert any(thread.name == "watchdog" for thread in threading.enumerate())
            time.sleep(0.2)

    callbacks = [Watchdog(timeout_minutes=1 / 60), Slow()]
    trainer(tmp_path, callbacks, max_steps=8).fit(pretraining(), ResumableLoader(40), validation_loader())
    assert not ended
    assert not any(thread.name == "watchdog" for thread in threading.enumerate())


def test_it_is_off_by_default(tmp_path: Path):
    class Look(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            assert not any(thread.name == "watchdog" for thread in threading.enumerate())

    trainer(tmp_path, [Watchdog(), Look()], max_steps=2).fit(pretraining(), ResumableLoader(40), validation_loader())


def test_the_time_is_above_zero():
    with pytest.raises(UserError, match="above 0"):
        Watchdog(timeout_minutes=0)
