"""A process that the system kills, as it does when memory runs out, is named in one sentence."""

import json
import os
import re
import signal
from pathlib import Path

import lightning as L
import pytest
from torch.utils.data._utils.signal_handling import _error_if_any_worker_fails

import zoo
from kernels import UserError
from zoo.data.text.tokenizer import Tokenizer

from .commands import FIT, Command, start

pytest_plugins = "tests.desk"
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")

KILLER = """
import os, signal, time
import lightning as L

class KillsItself(L.Callback):
    def __init__(self, others_wait: bool) -> None:
        self.others_wait = others_wait

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_rank == 0 and trainer.global_step == 2 and self.others_wait:
            time.sleep(1000)
"""


def children() -> set[int]:
    """Processes forked from this one; others, such as Python's resource tracker, have another command line."""
    numbers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    own = Path("/proc/self/cmdline").read_bytes()
    return {int(number) for number in numbers if Path(f"/proc/{number}/cmdline").read_bytes() == own}


class KillsAWorker(L.Callback):
    """Kills a data worker after the second step; the exception that follows may be any."""

    def __init__(self, hides_it: bool) -> None:
        self.hides_it, self.before = hides_it, children()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            worker = min(children() - self.before)
            try:
                os.kill(worker, signal.SIGKILL)
                os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
                _error_if_any_worker_fails()  # PyTorch's signal handler; Lightning may have replaced it
            except RuntimeError:
                if not self.hides_it:
                    raise
            raise TypeError("silu(): argument 'input' must be Tensor")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds workers in /proc")
@pytest.mark.parametrize("hides_it", [False, True])
def test_a_data_worker(desk: Path, hides_it: bool):
    options = ("data.num_workers=1", "checkpoints.every_n_steps=1")
    with pytest.raises(UserError) as caught:
        zoo.fit("gdn_h2.yaml", "tiny.yaml", *options, run="w", callbacks=[KillsAWorker(hides_it)])
    said = str(caught.value)
    assert re.match(r"data\.num_workers: the data worker with process id \d+ was killed .*ran out of memory", said)
    assert said.endswith("fit --resume runs/w continues from the last checkpoint.")


@pytest.mark.slow
def test_a_process_that_turns_text_into_tokens(command: Command, monkeypatch: pytest.MonkeyPatch, desk: Path):
    encode_batch, first = Tokenizer.encode_batch, os.getpid()

    def is_killed_elsewhere(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
        if os.getpid() != first:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode_batch(tokenizer, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", is_killed_elsewhere)
    (desk / "text.txt").write_text("some words of a text\n" * 5000)
    done = command(*FIT, "--data.path=text.txt", "--data.preprocessing_workers=2")
    assert done.code == 2
    assert done.err.splitlines()[-1].startswith(
        "error: data.preprocessing_workers: one of the 2 processes that turn text into tokens was"
    )


@pytest.mark.slow
@pytest.mark.parametrize("others_wait", [False, True])
def test_the_process_of_another_device(desk: Path, shared_cache: Path, others_wait: bool):
    """Whether the others get an error, as from Gloo, or wait, as in NCCL."""
    (desk / "killer.py").write_text(KILLER)
    callback = {"class_path": "killer.KillsItself", "init_args": {"others_wait": others_wait}}
    (desk / "killer.yaml").write_text(json.dumps({"trainer": {"callbacks": callback}}))
    options = ("--config=killer.yaml", "--trainer.devices=2", "--trainer.strategy=ddp", "--run=two")
    process = start(desk, shared_cache, *FIT, *options, OMP_NUM_THREADS="1", ZOO_RUN="")
    _, err = process.communicate(timeout=240)
    assert process.returncode == 2, err
    assert "Traceback" not in err
    (said,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert re.search(r"trainer\.devices: the process of rank 1 \(process id \d+\) was killed by SIGKILL, usually", said)
