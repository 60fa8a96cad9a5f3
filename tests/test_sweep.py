"""`sweep`: an ablation from YAML to table, CSV and picture."""

import csv
from pathlib import Path

import pytest

from kernels import UserError
from zoo.experiments import Runner
from zoo.files.sealed_json import write_sealed

SWEEP = """
base: [gated_deltanet.yaml, tiny.yaml, {model: {num_layers: 1}}]
axes:
  model.stack.mixer.factor: [1, 2]
metric: val_loss
"""


@pytest.fixture
def small(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        "zoo.experiments.definition.SOON", 600
    )  # seconds until a bar is shown, above what a busy machine takes
    (desk / "small.yaml").write_text(SWEEP)
    return desk


@pytest.mark.parametrize("name", ["sweep.csv", "sweep.png"])
def test_files_of_somebody_else_are_kept(command, small, name) -> None:
    (small / "mine").mkdir()
    (small / "mine" / name).write_text("years of work")
    done = command("sweep", "--config", "small.yaml", "--folder=mine").refused()
    expected = f"folder: mine/{name} exists, but the folder has no runs.json, so it is not replaced; move it, or"
    assert expected in done.err
    assert [path.read_text() for path in (small / "mine").iterdir()] == ["years of work"]


def test_the_list_of_runs_of_somebody_else_is_kept(tmp_path) -> None:
    file = tmp_path / "runs.json"
    write_sealed(file, {"monday": {"km": 5}})
    for before, reason in ((file.read_text(), "monday has no config"), ('{"monday": 5}', "it has lost the hash")):
        file.write_text(before)
        with pytest.raises(UserError, match=rf"runs\.json is damaged \({reason}.* or choose another folder"):
            Runner(["false"], tmp_path).run([])
        assert file.read_text() == before


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_a_sweep_and_the_same_again(command, small) -> None:
    options = ["--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    first = command("sweep", "--config", "small.yaml", *options, "--jobs=2").ok()
    folder = small / "runs" / "small"
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["steps"]) for row in rows] == [("factor=1,seed=0", "2"), ("factor=2,seed=0", "2")]
    assert int(rows[1]["state_size"]) == 2 * int(rows[0]["state_size"])
    assert rows[0]["val_loss"][:5] in first.out
    assert (folder / "sweep.png").stat().st_size > 5000
    before = (folder / "factor=1,seed=0" / "metrics.jsonl").stat().st_mtime_ns
    command("sweep", "--config", "small.yaml", *options).ok()
    assert (folder / "factor=1,seed=0" / "metrics.jsonl").stat().st_mtime_ns == before
    other = command("sweep", "--config", "small.yaml", "--trainer.max_steps=3", "--trainer.val_check_interval=2")
    assert other.code == 2
    assert "is a run with trainer.max_steps: 2, and now it is 3" in other.err


@pytest.mark.slow
def test_runs_that_fail_a_gate_are_named(command, small) -> None:
    for factor, loss in ((1, 3.0), (2, 2.5)):
        folder = small / "runs" / "small" / f"factor={factor},seed=0"
        folder.mkdir(parents=True)
        write_sealed(folder / "results.json", {"status": "complete", "val_loss": loss, "state_size": 256})
    done = command("sweep", "--config", "small.yaml", "--gates=[{numbers: [val_loss], at_most: 2.7}]").ok()
    assert "1 run fails a gate, so read the rest with care: 1, seed 0: val_loss is 3, above 2.7" in done.out
    done = command("sweep", "--config", "small.yaml", "--gates=[{numbers: [val_loss], at_most: 3.5}]")
    assert "gate," not in done.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "smal.yaml"], "did you mean"),
        (["--config", "small.yaml", "--trainer.max_stps=3"], "did you mean 'max_steps'"),
        (["--config", "small.yaml", "--axes={'model.stack.mixer.facto': [1]}"], "did you mean 'factor'"),
        (["--config", "small.yaml", "--sedes=[1]"], "sedes"),
        (["--config", "small.yaml", "--gates=[{numbers: [val_loss]}]"], "gates: val_loss has no bound"),
        (["--config", "small.yaml", "--gates=[{number: [val_loss]}]"], "did you mean 'numbers'"),
        (["--config", "small.yaml", "--jobs=0"], "jobs: 0 must be at least 1"),
    ],
)
def test_a_mistake_is_named_before_the_first_run(command, small, arguments, expected) -> None:
    assert expected in command("sweep", *arguments).sentence()
    assert not (small / "runs").exists()
