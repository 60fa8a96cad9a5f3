"""`reproductions/sweep_rows.py`: a row for each run, in the order of the seeds, and nothing is trained twice."""

import sys
from pathlib import Path

import pytest

from reproductions import sweep_rows
from reproductions.write_csv import read, write
from zoo.config import from_config
from zoo.config.overlays import load_items
from zoo.experiments.commands import read_sweep

SWEEP = """
base: [recall/mqar.yaml, {trainer: {max_steps: 1, val_check_interval: 1}, data: {batch_size: 2, validation_samples: 4}}]
axes: {heads: {one: null}}
seeds: [1, 0]
metric: val_accuracy
"""


@pytest.mark.slow
def test_rows_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    sweep, table = tmp_path / "small.yaml", tmp_path / "rows.csv"
    sweep.write_text(SWEEP)
    arguments = ["sweep_rows.py", str(sweep), f"--table={table}", f"--folder={tmp_path / 'runs'}", "--commit=abc"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--minutes=0"])
    sweep_rows.main()
    assert "2 runs left; the same command continues" in capsys.readouterr().out
    assert not table.exists()
    monkeypatch.setattr(sys, "argv", arguments)
    sweep_rows.main()
    rows = read(table)
    assert [row["seed"] for row in rows] == ["0", "1"]
    assert all(row["steps"] == "1" and row["cell"] == "one" and row["val_accuracy"] for row in rows)
    sweep_rows.main()
    assert "0 runs without a row" in capsys.readouterr().out
    assert read(table) == rows


@pytest.mark.slow
def test_rates_are_chosen_on_some_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sweep, table = tmp_path / "small.yaml", tmp_path / "rows.csv"
    sweep.write_text(SWEEP.replace("seeds: [1, 0]", "seeds: [2, 0]\nlearning_rates: [1.0e-3, 1.0e-2]\nmode: max"))
    arguments = ["sweep_rows.py", str(sweep), f"--table={table}", f"--folder={tmp_path / 'runs'}", "--chosen-on=0"]
    monkeypatch.setattr(sys, "argv", arguments)
    sweep_rows.main()
    rows = read(table)
    assert [(row["seed"], row["learning_rate"]) for row in rows] == [("0", "0.001"), ("0", "0.01")]
    write([row | {"val_accuracy": accuracy} for row, accuracy in zip(rows, ("0.2", "0.1"), strict=True)], table)
    sweep_rows.main()
    assert [(row["seed"], row["learning_rate"]) for row in read(table)[2:]] == [("2", "0.001")]


def test_one_cell_chooses_the_rate_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`one` chooses for `two` with as many steps, and a control for itself; the rate of `few` is still open."""
    axes = """axes:
  steps: {few: null, many: trainer.max_steps=2}
  heads: {one: null, two: model.num_heads=2}
controls: {wide: model.hidden_size=128}
learning_rates: [1.0e-3, 1.0e-2]
seeds: [0, 5]
mode: max
"""
    sweep, table = tmp_path / "small.yaml", tmp_path / "rows.csv"
    sweep.write_text(SWEEP.replace("axes: {heads: {one: null}}\nseeds: [1, 0]\n", axes))
    started: list[str] = []
    monkeypatch.setattr(sweep_rows, "work", lambda jobs, *_: started.extend(run.name for _, run in jobs) or len(jobs))
    arguments = [str(sweep), f"--table={table}", f"--folder={tmp_path}", "--chosen-on=0"]
    sweep_rows.main([*arguments, "--chosen-in=one"])
    cells = ("steps=few,heads=one", "steps=many,heads=one", "control=wide")
    assert started == [f"{cell},lr={rate},seed=0" for rate in (0.001, 0.01) for cell in cells]
    accuracies = {"steps=few,heads=one": (0.1,), "steps=many,heads=one": (0.1, 0.2), "control=wide": (0.2, 0.1)}
    rows = [
        {"sweep": "small", "name": f"{cell},lr={rate},seed=0", "overrides": "", "val_accuracy": accuracy}
        for cell, values in accuracies.items()
        for rate, accuracy in zip((0.001, 0.01), values, strict=False)
    ]
    write(rows, table)
    started.clear()
    sweep_rows.main([*arguments, "--chosen-in=one"])
    assert started == [
        "steps=few,heads=one,lr=0.01,seed=0",
        "control=wide,lr=0.001,seed=5",
        "steps=many,heads=one,lr=0.01,seed=5",
        "steps=many,heads=two,lr=0.01,seed=5",
    ]


@pytest.mark.slow
def test_runs_are_evaluated_where_they_were_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sweep, table, folder = tmp_path / "small.yaml", tmp_path / "rows.csv", tmp_path / "runs" / "small"
    sweep.write_text(SWEEP.replace("seeds: [1, 0]", "seeds: [0]"))
    arguments = ["sweep_rows.py", str(sweep), f"--table={table}", f"--folder={tmp_path / 'runs'}"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--evaluate=--tasks=mqar --samples=x"])
    sweep_rows.main()
    assert "was not evaluated (exit code" in capsys.readouterr().out
    assert not table.exists()
    trained = (folder / "heads=one,seed=0" / "results.json").stat().st_mtime_ns
    evaluation = "--tasks=mqar --lengths=[64] --samples=4"
    monkeypatch.setattr(sys, "argv", [*arguments, f"--evaluate={evaluation}"])
    sweep_rows.main()
    assert (folder / "heads=one,seed=0" / "results.json").stat().st_mtime_ns == trained
    second = tmp_path / "rows.evaluations.csv"
    rows = read(second)
    assert {(row["task"], row["length"], row["seed"], row["evaluation"]) for row in rows} == {
        ("mqar", "64", "0", evaluation)
    }
    assert all(0 <= float(row["value"]) <= 1 for row in rows)
    others = [row | {"name": "another", "value": "0.5"} for row in rows]
    write([*others, *(row | {"evaluation": "--tasks=s_niah_1"} for row in rows)], second)
    monkeypatch.setattr(sys, "argv", [*arguments, f"--evaluate={evaluation}", "--delete"])
    sweep_rows.main()
    again = read(second)
    assert [row["evaluation"] for row in again if row["name"] == "another"] == [evaluation] * len(rows)
    ours = [row["evaluation"] for row in again if row["name"] != "another"]
    assert sorted(ours) == sorted(["--tasks=s_niah_1", evaluation] * len(rows))
    assert not (folder / "heads=one,seed=0").exists()
    assert len(read(table)) == 1
    sweep_rows.main()
    assert "0 runs without a row" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "models"), [("length_extrapolation", 9), ("needles", 3), ("mamba2_start", 6), ("attention_ratio", 9)]
)
def test_models_of_a_comparison_have_as_many_parameters(name: str, models: int):
    configs = {
        run.cell: run.parsed
        for run in read_sweep(load_items([f"reproductions/sweeps/{name}.yaml"])).runs()
        if run.parsed
    }
    for config in configs.values():
        config.model.vocab_size = 16_384
    sizes = [from_config(config, device="meta").num_parameters() for config in configs.values()]
    assert len(sizes) == models
    assert max(sizes) < 1.01 * min(sizes)
