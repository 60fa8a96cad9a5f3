"""Several processes on one machine, which Lightning starts itself by repeating the command line."""

import json
import shutil
from pathlib import Path

import pytest

import cli
from zoo.train.metrics_file import read_metrics

from .commands import FIT, run_process, sitting_at

# Writes down what each process trains on.
WATCHER = """
import json
from pathlib import Path
import lightning as L

class Watch(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        with open(Path(trainer.default_root_dir) / f"seen-{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(batch.tokens.tolist()) + chr(10))
"""
WATCHED = (*FIT, "--config", "watching.yaml")


def seen(run: Path, rank: int) -> list[list[list[int]]]:
    """The sequences of each step of a process."""
    return [json.loads(line) for line in (run / f"seen-{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    """`one` ran in this process, `two` in two."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "sample_watcher.py").write_text(WATCHER)
    (folder / "watching.yaml").write_text("trainer: {callbacks: {class_path: sample_watcher.Watch}}\n")
    with sitting_at(folder, shared_cache):
        assert cli.run([*WATCHED, "--run", "one", "--trainer.max_steps=6"]) == 0
    options = ("--run", "two", "--trainer.devices=2", "--trainer.strategy=ddp")
    done = run_process(folder, shared_cache, *WATCHED, *options).ok()
    assert "usage" not in done.out
    assert "sync_dist" not in done.err
    return folder


@pytest.mark.slow
def test_two_processes_train_as_one(desk: Path, finished: Path) -> None:
    two, one = (
        json.loads((folder / "results.json").read_text()) for folder in (desk / "runs/two", finished / "runs/done")
    )
    assert two["devices"] == 2
    assert two["tokens_seen"] == one["tokens_seen"]
    assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-3)
    bytes_per_token = [row["val_loss"] / row["val_bits_per_byte"] for row in (one, two)]
    assert bytes_per_token[0] == pytest.approx(bytes_per_token[1], rel=1e-6)
    losses = []
    for run in (desk / "runs/two", finished / "runs/done"):
        losses.append([row["train_loss"] for row in read_metrics(run / "metrics.jsonl") if "train_loss" in row])
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.slow
def test_no_sample_is_lost_or_repeated_when_one_process_continues_two(desk: Path, shared_cache: Path) -> None:
    two, one, fewer = (desk / "runs" / name for name in ("two", "one", "fewer"))
    shutil.copytree(two, fewer, ignore=shutil.ignore_patterns("seen-*"))
    with sitting_at(desk, shared_cache):
        alone = ("--trainer.devices=1", "--trainer.strategy=auto", "--trainer.max_steps=6")
        assert cli.run(["fit", "--resume", "fewer", *alone]) == 0
    together = [first + second for first, second in zip(seen(two, 0), seen(two, 1), strict=True)]
    assert len(together) == 4
    assert together + seen(fewer, 0) == seen(one, 0)
    assert len({str(sequence) for step in seen(one, 0) for sequence in step}) == 6 * 2
