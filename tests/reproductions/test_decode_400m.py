"""`reproductions/decode_400m.py`: times per token of all models, which are measured once, and their floor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from reproductions import decode_400m as table
from reproductions import peers
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


def test_the_table_has_no_other_models():
    assert {row["model"].removeprefix("fla ") for row in read(table.MEASURED)} <= {*overlays()}
