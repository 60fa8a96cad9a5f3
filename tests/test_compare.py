"""`compare` trains several configs, keeps what is finished, and shows one table and one picture."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from zoo.config.find import CONFIGS
from zoo.experiments import commands
from zoo.files.sealed_json import write_sealed

TINY = [
    "--model.hidden_size=32",
    "--model.num_heads=2",
    "--model.num_layers=3",
    "--data.sequence_length=32",
    "--data.batch_size=2",
    "--data.max_characters=200000",
    "--trainer.max_steps=4",
    "--trainer.val_check_interval=2",
    "--trainer.limit_val_batches=1",
    "--samples.max_new_tokens=2",
]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_runs")
def test_two_configs_one_table_and_nothing_twice(command, tmp_path) -> None:
    configs = ["gdn_h2.yaml", "gla.yaml"]
    first = command("compare", *configs, *TINY, f"--folder={tmp_path}/out").ok()
    for name in ("gdn_h2", "gla", "bigram model"):
        assert name in first.out
    assert "out/comparison.png" in first.out
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [row["run"] for row in rows] == ["gdn_h2", "gla"]
    assert (tmp_path / "out" / "comparison.png").stat().st_size > 5000
    written = (tmp_path / "out" / "gla" / "metrics.jsonl").stat().st_mtime_ns
    command("compare", *configs, *TINY, f"--folder={tmp_path}/out").ok()
    assert (tmp_path / "out" / "gla" / "metrics.jsonl").stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["gla.yaml", "--jobs=0"], "jobs: 0 must be at least 1"),
        (["--config=tiny.yaml"], "compare: missing; name the configs to compare, such as gdn_h2.yaml gla.yaml"),
        (["gla.yaml", "--config=tiny.yaml", "--model.num_heads=5"], "5 does not divide hidden_size 32"),
        (["gla.yaml", "gdn_h2.yaml", "--config=ablate/no_conv.yaml"], "mixer"),  # of Gated DeltaNet only
        (["gla.yaml", "--config=num_heads=1,seed=0/config.yaml"], "neither a file nor one of configs/"),
    ],
)
def test_a_mistake_is_named_before_the_first_run(command, tmp_path, arguments, expected) -> None:
    done = command("compare", *arguments, f"--folder={tmp_path}/out").refused()
    assert expected in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["comparison.png", "comparison.json"])
def test_files_of_somebody_else_are_kept(command, desk, name) -> None:
    (desk / "mine").mkdir()
    (desk / "mine" / name).write_text("years of work")
    done = command("compare", "gla.yaml", "--config=tiny.yaml", "--folder=mine").refused()
    assert f"folder: mine/{name} exists, but the folder has no runs.json, so it is not replaced" in done.err
    assert [path.read_text() for path in (desk / "mine").iterdir()] == ["years of work"]


ROW = {
    "status": "complete",
    "parameters": 1000,
    "state_size": 64,
    "tokens_seen": 128,
    "val_loss": 2.5,
    "val_loss_by_position": [2.5],
    "bigram_loss": 3.9,
    "tokens_per_second": 10.0,
    "wall_seconds": 1.0,
}


def finished_run(folder: Path, val_loss: float | None = 2.5) -> None:
    """A folder as a complete run leaves it, as far as a comparison reads it."""
    folder.mkdir(parents=True)
    write_sealed(folder / "results.json", {**ROW, "run": folder.name, "val_loss": val_loss})
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 4, "tokens": 128, "val_loss": val_loss}) + "\n")


def recorded(folder: Path) -> dict:
    """Name → config of the runs in the folder of a comparison."""
    return {name: run for name, run in json.loads((folder / "runs.json").read_text()).items() if isinstance(run, dict)}


@pytest.mark.slow
@pytest.mark.parametrize("overlay", ["--config=tiny.yaml", "tiny.yaml"])
def test_an_overlay_is_applied_to_every_config(command, desk, overlay) -> None:
    for name in ("gdn_h2", "gla"):
        finished_run(desk / "out" / name)
    command("compare", "gdn_h2.yaml", overlay, "gla.yaml", "--model.num_layers=6", "--folder=out").ok()
    runs = recorded(desk / "out")
    assert [*runs] == ["gdn_h2", "gla"]
    assert all(run["model"]["hidden_size"] == 32 and run["model"]["num_layers"] == 6 for run in runs.values())


@pytest.mark.slow
def test_a_loss_that_is_not_finite_comes_last(command, desk) -> None:
    finished_run(desk / "out" / "gla", None)
    finished_run(desk / "out" / "gdn_h2")
    done = command("compare", "gla.yaml", "gdn_h2.yaml", "--config=tiny.yaml", "--folder=out").ok()
    assert 0 < done.out.index("2.500") < done.out.index("not finite")
    assert (desk / "out" / "comparison.png").is_file()


def test_runs_of_different_vocabularies_are_sorted_by_bits_per_byte() -> None:
    def shown(*rows: dict) -> str:
        written = io.StringIO()
        Console(file=written, width=200).print(commands.comparison_table([{**ROW, **row} for row in rows]))
        return written.getvalue()

    small = {"run": "small", "val_loss": 1.5, "val_bits_per_byte": 2.25, "tokenizer_hash": "a"}
    large = {"run": "large", "val_loss": 3.5, "val_bits_per_byte": 2.125, "tokenizer_hash": "b"}
    old = {"run": "old", "val_loss": 0.5}
    table = shown(small, large, old)
    assert table.index("large") < table.index("small") < table.index("old")
    assert "sorted by bits per byte" in table
    assert "no bits per byte for lack of a tokenizer that counts them: old" in table
    table = shown(small, large | {"tokenizer_hash": "a"})
    assert table.index("small") < table.index("large")
    assert "2.125" in table
    assert "sorted by" not in table


@pytest.mark.slow
def test_a_run_that_fails_is_named_below_the_table_of_the_others(command, desk, monkeypatch) -> None:
    finished_run(desk / "out" / "gla")
    monkeypatch.setattr(commands, "COMMAND", (sys.executable, "-c", "raise SystemExit(3)"))
    done = command("compare", "gla.yaml", "gdn_h2.yaml", "--config=tiny.yaml", "--folder=out").refused()
    assert "2.500" in done.out
    assert "1 of 2 runs failed: gdn_h2 (exit code 3, see out/gdn_h2.log)" in done.err.splitlines()[-1]


@pytest.mark.slow
def test_configs_of_runs_whose_names_have_equals_signs(command, desk, monkeypatch) -> None:
    names = ["num_heads=1,seed=0", "num_heads=2,seed=0"]
    for name in names:
        (desk / name).mkdir()
        (desk / name / "config.yaml").write_text((CONFIGS / "gla.yaml").read_text())
        finished_run(desk / "out" / name)
    configs = [f"{name}/config.yaml" for name in names]
    command("compare", *configs, "--config=tiny.yaml", "--folder=out").ok()
    assert [*recorded(desk / "out")] == names
