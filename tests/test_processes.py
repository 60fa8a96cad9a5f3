"""Several processes on one machine, which Lightning starts itself by repeating the command line."""

import json
from pathlib import Path

import pytest

from .commands import FIT, start

pytest_plugins = "tests.desk"


def test_two_processes_train_as_one(desk: Path, shared_cache: Path, finished: Path) -> None:
    options = ("--run", "two", "--trainer.devices=2", "--trainer.strategy=ddp")
    process = start(desk, shared_cache, *FIT, *options, OMP_NUM_THREADS="1")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "usage" not in out
    assert "sync_dist" not in err
    two, one = (
        json.loads((folder / "results.json").read_text()) for folder in (desk / "runs/two", finished / "runs/done")
    )
    assert two["devices"] == 2
    assert two["tokens_seen"] == one["tokens_seen"]
    assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-3)
