"""A process that is killed while a checkpoint is written in the background continues from the one before."""

import json
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest

import cli
from zoo.checkpoints.format import read_checkpoint
from zoo.train.metrics_file import read_metrics

from .commands import FIT, sitting_at, start

pytest_plugins = "tests.desk"
pytestmark = pytest.mark.slow

STEPS, SLOW = 12, 4
RUN = (*FIT, "--config", "train/background_checkpoints.yaml", "--checkpoints.every_n_steps=2")
LONG = (f"--trainer.max_steps={STEPS}", f"--trainer.val_check_interval={STEPS}", "--optim.warmup_steps=2")
# A disk that takes half of a checkpoint, and never the rest: training goes on until the next one waits for it.
STALLER = f"""
import time
import lightning as L
import torch

save = torch.save

def stall(checkpoint, file):
    if checkpoint["global_step"] < {SLOW}:
        return save(checkpoint, file)
    file.write(b"half a checkpoint")
    file.flush()
    time.sleep(600)

class Stall(L.Callback):
    def on_fit_start(self, trainer, module):
        torch.save = stall
"""


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["train_loss"] for row in read_metrics(run / "metrics.jsonl") if "train_loss" in row}


def test_it_continues_bitwise(tmp_path: Path, shared_cache: Path) -> None:
    (tmp_path / "staller.py").write_text(STALLER)
    (tmp_path / "stalling.yaml").write_text("trainer: {callbacks: {class_path: staller.Stall}}\n")
    run, whole = tmp_path / "runs" / "killed", tmp_path / "runs" / "whole"
    with sitting_at(tmp_path, shared_cache):
        assert cli.run([*RUN, *LONG, "--checkpoints.in_background=false", "--run", "whole"]) == 0
    stalling = (*RUN, *LONG, "--config", "stalling.yaml", "--run", "killed")
    process = start(tmp_path, shared_cache, *stalling, OMP_NUM_THREADS="1", ZOO_RUN="")
    deadline = time.monotonic() + 240
    while not (run / "metrics.jsonl").is_file() or max(losses(run)) < SLOW:  # the index of the step after it
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(names) == 2
    assert fnmatch(names[0], ".last.ckpt.*.partial")
    assert names[1] == "last.ckpt"
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"] == SLOW - 2
    assert set(losses(run)) == set(range(SLOW + 1))
    with sitting_at(tmp_path, shared_cache):
        without = ("--trainer.callbacks=null",)
        assert cli.run(["fit", "--resume", "killed", *without]) == 0
    assert losses(run) == losses(whole)
    actual, expected = (json.loads((folder / "results.json").read_text()) for folder in (run, whole))
    assert actual["val_loss"] == expected["val_loss"]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.ckpt", "best.ckpt"}
