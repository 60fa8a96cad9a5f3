"""A run that was stopped and continued is the run that was never stopped, to the last bit."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

import cli

from .commands import FIT, sitting_at, start

pytestmark = pytest.mark.slow

STEPS = 8
# A run with everything that could go out of step: a validation between the steps, and a learning rate that moves.
RUN = (*FIT, f"--trainer.max_steps={STEPS}", "--checkpoints.every_n_steps=3", "--optim.warmup_steps=2")
# Sends a signal to its own process in the middle of a step, so that where a run is stopped does not depend on luck.
STOPPER = """
import os
import lightning as L

class Stop(L.Callback):
    def on_before_backward(self, trainer, module, loss):
        if trainer.global_step == int(os.environ.get("STOP_AT", -1)):
            os.kill(os.getpid(), int(os.environ["STOP_WITH"]))
"""
# signal: where it comes, what the process returns, the last step that is saved
STOPS = {
    signal.SIGINT: (5, 130, 6),  # the step in progress is finished and saved
    signal.SIGTERM: (1, 143, 2),
    signal.SIGKILL: (7, -signal.SIGKILL, 6),  # the checkpoint of step 6, and a step that is lost
}


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """The loss of each training step, as it was last written."""
    return {row["step"]: row["train_loss"] for row in rows(run) if "train_loss" in row}


@pytest.fixture(scope="module")
def desks(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    """`whole` ran through; `SIGINT`, `SIGTERM` and `SIGKILL` are processes that were stopped (see STOPS)."""
    folder = tmp_path_factory.mktemp("desks")
    (folder / "stopper.py").write_text(STOPPER)
    (folder / "stopping.yaml").write_text("trainer: {callbacks: {class_path: stopper.Stop}}\n")
    with sitting_at(folder, shared_cache):
        assert cli.run([*RUN, "--run", "whole"]) == 0
    command = (*RUN, "--config", "stopping.yaml", "--run")
    processes = {  # all at once; one thread, as in the tests, since another order of a sum is another sum
        number: start(
            folder,
            shared_cache,
            *(*command, number.name),
            STOP_AT=str(at),
            STOP_WITH=str(int(number)),
            OMP_NUM_THREADS="1",
            ZOO_RUN="",
        )
        for number, (at, _, _) in STOPS.items()
    }
    for number, process in processes.items():
        out, err = process.communicate(timeout=300)
        (folder / f"{number.name}.code").write_text(str(process.returncode))
        (folder / f"{number.name}.err").write_text(err + out)
    return folder


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_a_stopped_process_says_so(number: signal.Signals, desks: Path):
    _, code, saved = STOPS[number]
    said = (desks / f"{number.name}.err").read_text()
    assert int((desks / f"{number.name}.code").read_text()) == code, said
    assert "Traceback" not in said
    results = desks / "runs" / number.name / "results.json"
    if number == signal.SIGKILL:
        assert not results.exists()
    else:
        assert f"step {saved} is saved" in said
        assert f"fit --resume runs/{number.name}" in said
        assert json.loads(results.read_text())["status"] == "interrupted"


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_resume_is_exact(number: signal.Signals, desks: Path, shared_cache: Path):
    run, whole = desks / "runs" / number.name, desks / "runs" / "whole"
    _, _, saved = STOPS[number]
    before = len(rows(run))
    with sitting_at(desks, shared_cache):
        assert cli.run(["fit", "--resume", f"runs/{number.name}"]) == 0
    continued = [row["step"] for row in rows(run)[before:] if "train_loss" in row]
    assert continued == list(range(saved, STEPS))  # from where it was saved, not from the start
    assert losses(run) == losses(whole)  # bitwise: JSON keeps every digit of an fp32 number
    assert len(set(losses(whole).values())) == STEPS
    actual, expected = (json.loads((folder / "results.json").read_text()) for folder in (run, whole))
    assert actual["status"] == "complete"
    for name in ("steps", "tokens_seen", "val_loss", "val_loss_by_position", "val_loss_mixers_zeroed", "bigram_loss"):
        assert actual[name] == expected[name], name
    assert actual.keys() == expected.keys()


def test_resume_with_more_steps(desks: Path, shared_cache: Path):
    """An override changes the continued run; with a constant rate it is the longer run's beginning."""
    longer = ("--trainer.max_steps=11", "--optim.schedule=constant")
    with sitting_at(desks, shared_cache):
        assert cli.run([*RUN, "--optim.schedule=constant", "--run", "short"]) == 0
        assert cli.run([*RUN, *longer, "--run", "long"]) == 0
        assert cli.run(["fit", "--resume", "short", longer[0]]) == 0  # by its name in runs/
        kept = (desks / "runs" / "short" / "config.yaml").read_text()
    assert losses(desks / "runs" / "short") == losses(desks / "runs" / "long")
    assert len(losses(desks / "runs" / "short")) == 11
    assert "max_steps: 11" in kept


def test_a_run_can_be_moved_and_a_complete_one_has_nothing_to_do(
    desks: Path, tmp_path: Path, shared_cache: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(desks / "runs" / "whole", tmp_path / "elsewhere")
    before = losses(tmp_path / "elsewhere")
    with sitting_at(tmp_path, shared_cache):
        assert cli.run(["fit", "--resume", "elsewhere"]) == 0
    assert losses(tmp_path / "elsewhere") == before
    assert json.loads((tmp_path / "elsewhere" / "results.json").read_text())["steps"] == STEPS
    assert f"elsewhere is complete; --trainer.max_steps above {STEPS} trains it further" in capsys.readouterr().out
    config = (tmp_path / "elsewhere" / "config.yaml").read_text()
    with sitting_at(tmp_path, shared_cache):
        changed = ["--optim.learning_rate=1e-5", "--config=train/profile.yaml"]
        assert cli.run(["fit", "--resume", "elsewhere", *changed]) == 0
    out = capsys.readouterr().out
    assert re.search(
        r"^no steps are left, so this changes nothing: optim.learning_rate: \S+ → 1e-05$", out, re.MULTILINE
    )
    assert (tmp_path / "elsewhere" / "config.yaml").read_text() == config


def test_a_run_killed_after_its_last_step_is_completed(desks: Path, tmp_path: Path, shared_cache: Path):
    """Its last checkpoint is there, its results are not; nothing is trained again."""
    shutil.copytree(desks / "runs" / "whole", tmp_path / "killed")
    whole = json.loads((tmp_path / "killed" / "results.json").read_text())
    (tmp_path / "killed" / "results.json").unlink()
    with sitting_at(tmp_path, shared_cache):
        assert cli.run(["fit", "--resume", "killed"]) == 0
    actual = json.loads((tmp_path / "killed" / "results.json").read_text())
    for name in (
        "run",
        "tokens_per_second",
        "tokens_per_second_by_clock",
        "wall_seconds",
        "blake2b",
    ):  # other folder; nothing was trained; later; of them
        del actual[name], whole[name]
    assert actual == whole
    assert losses(tmp_path / "killed") == losses(desks / "runs" / "whole")
