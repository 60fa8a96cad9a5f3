"""FSDP2 in two processes on the CPU: the same training as in one, and checkpoints that all strategies continue.

One run is compared with one of a single process before each merge; the other tests are nightly.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

import cli
import zoo
from tests.commands import FIT, run_process, sitting_at
from zoo.train.metrics_file import read_metrics

pytestmark = pytest.mark.slow

TWO = ("--trainer.devices=2", "--trainer.accelerator=cpu")
SHARDED = "--trainer.strategy={class_path: zoo.train.fsdp2.FSDP2, init_args: {sharded_checkpoints: true}}"
STRATEGIES = {
    "fsdp2": (*TWO, "--trainer.strategy={class_path: zoo.train.fsdp2.FSDP2}"),
    "sharded": (*TWO, SHARDED),
    "sharded-alone": ("--trainer.devices=1", "--trainer.accelerator=cpu", SHARDED),
    "ddp": (*TWO, "--trainer.strategy=ddp"),
    "one": ("--trainer.devices=1", "--trainer.strategy=auto"),
}


def run(folder: Path, cache: Path, *arguments: str) -> None:
    run_process(folder, cache, *arguments, timeout=300).ok()


def losses(run: Path) -> list[float]:
    rows = read_metrics(run / "metrics.jsonl")
    return [row[name] for row in rows for name in ("train_loss", "val_loss") if name in row]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    """A folder with four steps by FSDP2, with checkpoints of both kinds, and by DDP."""
    folder = tmp_path_factory.mktemp("fsdp2")
    with sitting_at(folder, shared_cache):
        for name in ("fsdp2", "sharded", "sharded-alone", "ddp"):
            run(folder, shared_cache, *FIT, *STRATEGIES[name], "--run", name)
    return folder


@pytest.fixture(scope="module")
def expected(begun: Path, shared_cache: Path) -> float:
    """The validation loss where DDP itself continues its run to seven steps."""
    shutil.copytree(begun / "runs" / "ddp", begun / "runs" / "expected")
    with sitting_at(begun, shared_cache):
        run(begun, shared_cache, "fit", "--resume", "expected", "--trainer.max_steps=7")
    return json.loads((begun / "runs" / "expected" / "results.json").read_text())["val_loss"]


def test_two_processes_train_as_one(finished: Path, tmp_path: Path, shared_cache: Path) -> None:
    """And the checkpoint of their shards has the weights that the single process has."""
    with sitting_at(tmp_path, shared_cache):
        run(tmp_path, shared_cache, *FIT, *STRATEGIES["sharded"], "--run", "sharded")
    two, one = tmp_path / "runs" / "sharded", finished / "runs" / "done"
    assert len(losses(one)) > 4
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    assert len(list((two / "checkpoints").glob("shards-*"))) == 1
    torch.testing.assert_close(zoo.load(two).state_dict(), zoo.load(one).state_dict(), rtol=0, atol=1e-5)


@pytest.mark.nightly
def test_it_trains_as_ddp_does(begun: Path) -> None:
    one, other = (losses(begun / "runs" / name) for name in ("fsdp2", "ddp"))
    assert one == pytest.approx(other, abs=1e-5)
    assert one


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("fsdp2", "fsdp2"),
        ("fsdp2", "one"),
        ("ddp", "fsdp2"),
        ("sharded", "sharded"),
        ("sharded", "sharded-alone"),
        ("sharded-alone", "sharded"),
        ("sharded", "one"),
    ],
)
def test_a_checkpoint_is_continued_by_any_strategy(
    begun: Path, expected: float, shared_cache: Path, first: str, then: str
) -> None:
    runs, name = begun / "runs", f"{first}-{then}"
    shutil.copytree(runs / first, runs / name)
    with sitting_at(begun, shared_cache):
        run(begun, shared_cache, "fit", "--resume", name, "--trainer.max_steps=7", *STRATEGIES[then])
    row = json.loads((runs / name / "results.json").read_text())
    assert row["steps"] == 7
    assert row["val_loss"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.nightly
def test_best_is_linked_again_after_a_kill(begun: Path, shared_cache: Path) -> None:
    """Strategies that restore after their setup know the checkpoint later than `on_fit_start`."""
    run_folder = begun / "runs" / "killed"
    shutil.copytree(begun / "runs" / "fsdp2", run_folder)
    for name in ("checkpoints/best.ckpt", "results.json"):
        (run_folder / name).unlink()
    with sitting_at(begun, shared_cache):
        run(begun, shared_cache, "fit", "--resume", "killed")
    assert (run_folder / "checkpoints" / "best.ckpt").samefile(run_folder / "checkpoints" / "last.ckpt")


@pytest.mark.nightly
def test_a_sharded_checkpoint_is_one_model(begun: Path, shared_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All verbs read it whole, and its weights are those of the checkpoint in one file."""
    checkpoints = [begun / "runs" / name / "checkpoints" / "last.ckpt" for name in ("sharded", "fsdp2")]
    assert len(list(checkpoints[0].parent.glob("shards-*"))) == 1  # earlier ones are gone
    sharded, whole = (zoo.load(path.parents[1]).state_dict() for path in checkpoints)
    torch.testing.assert_close(sharded, whole, rtol=0, atol=1e-6)
    with sitting_at(begun, shared_cache):
        options = {"validate": STRATEGIES["one"], "generate": ("--max_new_tokens=3",), "export": ("--output=exported",)}
        for verb, arguments in options.items():
            assert cli.run([verb, "--checkpoint", str(begun / "runs" / "sharded"), *arguments]) == 0
            assert not capsys.readouterr().err.count("error:")
