"""`reproductions/decode_400m.py`: times per token of all models, which are measured once, and their floor."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import UserError
from reproductions import decode_400m as table
from reproductions import peers, write_csv
from reproductions.mixers_400m import overlays
from reproductions.write_csv import read
from zoo.performance import decoding


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "overlays", lambda: dict.fromkeys(("gla", "transformer"), "model.num_layers=1"))
    return {"batch_sizes": [1, 2], "positions": [4, 8], "device": "cpu", "each": 0.01, "file": "table.csv"}


def test_models_are_measured_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(decoding, "roofline_ms", lambda device, dtype, flops, moved: moved / 1e9)
    table.decode_400m(["gla"], **options)
    first = read(Path("table.csv"))
    assert [(row["batch_size"], row["position"]) for row in first] == [("1", "4"), ("1", "8"), ("2", "4"), ("2", "8")]
    assert all(float(row["ratio"]) == float(row["ms"]) / float(row["floor_ms"]) for row in first)
    assert {row["precision"] for row in first} == {"32-true"}
    capsys.readouterr()
    table.decode_400m(**options)
    rows = read(Path("table.csv"))
    assert rows[:4] == first
    assert [row["model"] for row in rows[4:]] == 4 * ["transformer"]
    assert "gla" not in capsys.readouterr().out


def test_a_model_that_fails_is_named_and_the_others_are_measured(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    def ours(config: list[str], places: list[table.Place], *rest: object) -> list[table.Row]:
        if config[0] == "gla.yaml":
            raise RuntimeError("no kernel")
        eager, graph = ({"batch_size": 1, "position": 4, "ms": ms} for ms in (2.0, 1.0))
        return [eager, graph]

    monkeypatch.setattr(table, "ours", ours)
    with pytest.raises(UserError, match="gla: RuntimeError: no kernel"):
        table.decode_400m(**options)
    (row,) = read(Path("table.csv"))
    assert (row["model"], row["ms"]) == ("transformer", "1.0")


def test_peers_have_rows_of_their_own(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "require", lambda device: None)
    monkeypatch.setattr(peers, "same_model", lambda *_: peers.PeerModel("fla gated", lambda: torch.nn.Identity()))
    table.decode_400m(["gla"], fla=True, **options)
    rows = read(Path("table.csv"))
    assert [(row["batch_size"], row["position"]) for row in rows] == [("1", "4"), ("1", "8"), ("2", "4"), ("2", "8")]
    assert {(row["model"], row["ms"]) for row in rows} == {("fla gla", "")}  # an Identity has no config: a note
    options |= {"positions": None, "batch_sizes": [1], "file": "default.csv"}
    table.decode_400m(["gla"], fla=True, **options)
    assert [row["position"] for row in read(Path("default.csv"))] == ["1024"]


def test_rows_that_were_measured_stay(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Of four places two are missing, which lie in different rows and columns."""
    rows = [
        {"model": "gla", "batch_size": 1, "position": 4, "ms": 7.0},
        {"model": "gla", "batch_size": 2, "position": 8, "ms": 9.0},
    ]
    write_csv.write(rows, Path("table.csv"), table.COLUMNS)

    def ours(config: list[str], places: list[table.Place], *rest: object) -> list[table.Row]:
        every = itertools.product([1, 2], [4, 8])
        return [{"batch_size": batch_size, "position": position, "ms": 1.0} for batch_size, position in every]

    monkeypatch.setattr(table, "ours", ours)
    table.decode_400m(["gla"], **options)
    assert [row["ms"] for row in read(Path("table.csv"))] == ["7.0", "1.0", "1.0", "9.0"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"positions": [0]}, "^positions: 0 "),
        ({"batch_sizes": [-1]}, "^batch_sizes: -1 "),
        ({"each": 0.0}, "^each: "),
        ({"file": "other.csv"}, "^file: other.csv is a table without the columns batch_size, "),
    ],
)
def test_mistakes_are_one_sentence(options: dict[str, Any], wrong: dict[str, Any], said: str):
    Path("other.csv").write_text("name,ms\n")
    with pytest.raises(UserError, match=said):
        table.decode_400m(**options | wrong)
    assert Path("other.csv").read_text() == "name,ms\n"


def test_the_table_has_no_other_models():
    assert {row["model"].removeprefix("fla ") for row in read(table.MEASURED)} <= {*overlays()}
