"""Tables of runs for `scaling fit`: the same laws as of folders, single losses, and a sentence for each mistake."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zoo
from kernels import UserError
from tests.zoo.scaling.curves import ladder, write_run
from zoo.scaling.parametric import CHINCHILLA
from zoo.scaling.runs import OPTIONAL, REQUIRED, find_runs, read_run_table, select
from zoo.train.metrics_file import read_metrics

ROW = ("a", "GLA", "1e6", "6e6", "1e8 2e8", "3.5 3.25")
HEADER = ",".join(REQUIRED)


def write_table(file: Path, rows: list[dict[str, Any]]) -> Path:
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
    return file


def table_row(folder: Path) -> dict[str, Any]:
    """The row of a run in a folder."""
    results = json.loads((folder / "results.json").read_text())
    steps = range(results["warmup_steps"], results["decay_starts"])
    points = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] in steps]
    curve = {name: " ".join(str(row[name]) for row in points) for name in ("tokens", "train_loss")}
    return {name: results[name] for name in (*REQUIRED[1:4], *OPTIONAL)} | {"name": folder.name} | curve


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / "ladder" / f"run{i}", size) for i, size in enumerate(np.geomspace(1e8, 1e10, 6))]


def test_a_table_gives_the_runs_of_its_folders(folders: list[Path], tmp_path: Path):
    file = write_table(tmp_path / "runs.csv", [table_row(folder) for folder in folders])
    of_table, of_folders = select(find_runs([file]), {}), select(find_runs([tmp_path / "ladder"]), {})
    assert of_table.rates == of_folders.rates
    assert [run.name for run in of_table.runs] == [f"{file}: run{i}" for i in range(6)]
    for run, expected in zip(of_table.runs, of_folders.runs, strict=True):
        assert {name: run.row[name] for name in OPTIONAL} == {name: expected.row[name] for name in OPTIONAL}
        assert (run.curve.mixer, run.curve.size) == (expected.curve.mixer, expected.curve.size)
        assert run.curve.flops_per_token == expected.curve.flops_per_token
        assert np.array_equal(run.curve.tokens, expected.curve.tokens)
        assert np.array_equal(run.curve.losses, expected.curve.losses)


@pytest.mark.slow
@pytest.mark.parametrize("draws", [0, 4])
def test_single_losses_over_a_grid_of_sizes_and_tokens(tmp_path: Path, draws: int):
    """As in papers that publish sizes, tokens and final losses; the last draws are of the bootstrap."""
    rows = [
        dict(zip(REQUIRED, (f"{curve.run} {i}", "M", curve.size, 6 * curve.size, tokens, loss), strict=True))
        for curve in ladder(CHINCHILLA, points=5)
        for i, (tokens, loss) in enumerate(zip(curve.tokens, curve.losses, strict=True))
    ]
    file = write_table(tmp_path / "runs.csv", rows)
    (law,) = zoo.scaling.fit(file, method="parametric", draws=draws, verbose=False)
    assert law["parametric"]["alpha"] == pytest.approx(CHINCHILLA.alpha, abs=0.01)
    assert len(law["runs"]) == 30
    assert (tmp_path / "law" / "laws.json").is_file()
    with pytest.raises(UserError, match="it has 1 training loss, fewer than 8; method=parametric can also use a"):
        zoo.scaling.fit(file, method="envelope", draws=0, verbose=False)


def test_rules_about_runs_hold_for_tables(folders: list[Path], tmp_path: Path):
    rows = [table_row(folder) for folder in folders]
    first = rows[0]["train_loss"]
    rows.append(rows[0] | {"name": "nan", "train_loss": f"nan {first.partition(' ')[2]}"})
    rows.append(rows[0] | {"name": "up", "train_loss": f"{first.rpartition(' ')[0]} 9"})
    rows.append(rows[0] | {"name": "other", "data_hash": "xyz"})
    rows.append(rows[0] | {"name": "same", "learning_rate": ""})
    file = write_table(tmp_path / "runs.csv", rows)
    left_out = {name.rpartition(": ")[2]: reason for name, reason in select(find_runs([file]), {}).left_out.items()}
    assert [*left_out] == ["nan", "up", "other", "same"]
    assert left_out["nan"] == "it has diverged: its loss at 3e+09 tokens is not a number"
    assert left_out["up"].startswith("it has diverged: its loss ends at")
    assert left_out["other"].startswith("it was trained on other data (xyz)")
    assert "with the learning rate 0.001, has a lower loss" in left_out["same"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; it needs a line with the columns and one for each run; docs/scaling.md lists the columns"),
        (f"{HEADER}\n", "is empty; it needs"),
        ("name,mixers\na,b\n", "has no column 'parameters_without_embeddings'; docs/scaling.md lists"),
        (f"{HEADER}\na,GLA,1e6\n", "line 2: has fewer fields than the 6 columns"),
        (f"{HEADER}\n{','.join(ROW)},9\n", "line 2: has more fields than the 6 columns"),
        (f"{HEADER}\n{','.join(ROW)}\n{','.join(ROW)}\n", "line 3: the name 'a' is that of an earlier run"),
        (f"{HEADER}\na,,1e6,6e6,1,1\n", "line 2: mixers is empty; name what the laws are compared by"),
        (f"{HEADER}\na,GLA,1M,6e6,1,1\n", "line 2: parameters_without_embeddings is '1M', and must be a positive num"),
        (f"{HEADER}\na,GLA,1e6,0,1,1\n", "line 2: training_flops_per_token is '0', and must be a positive number"),
        (f"{HEADER}\na,GLA,1e6,6e6,,1\n", "line 2: tokens is '', and must be a positive number"),
        (f"{HEADER}\na,GLA,1e6,6e6,inf,1\n", "line 2: tokens is 'inf', and must be a positive number"),
        (f"{HEADER}\na,GLA,1e6,6e6,1 2,1 x\n", "line 2: train_loss is 'x', and must be a positive number"),
        (f"{HEADER}\na,GLA,1e6,6e6,1 2,1\n", "line 2: tokens has 2 numbers and train_loss 1; give as many of both"),
        (f"{HEADER}\na,GLA,1e6,6e6,2 1,1 2\n", "line 2: tokens must rise from each number to the next"),
        (f"{HEADER},learning_rate\n{','.join(ROW)},high\n", "line 2: learning_rate is 'high', and must be a positive"),
    ],
)
def test_a_mistake_in_a_table_is_described_in_a_sentence(tmp_path: Path, text: str, message: str):
    file = tmp_path / "runs.csv"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        read_run_table(file)
    assert message in str(error.value)
    assert str(error.value).startswith(f"runs: {file}")
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_table(tmp_path: Path, command):
    (tmp_path / "runs.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read as a CSV in UTF-8"):
        read_run_table(tmp_path / "runs.csv")
    (tmp_path / "runs.json").write_text("{}")
    done = command("scaling", "fit", str(tmp_path / "runs.json"))
    assert done.code != 0
    assert "is neither a folder nor a table of runs, which ends in .csv" in " ".join(done.err.split())
