"""`reproductions/peers_400m.py`: speeds of our models and of others, which are measured once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from reproductions import peers
from reproductions import peers_400m as table
from reproductions.mixers_400m import overlays
from reproductions.write_csv import read
from zoo.performance.model import build
from zoo.performance.model import read as parsed


@pytest.mark.slow
def test_speeds_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "overlays", lambda: dict.fromkeys(("gla", "transformer"), "model.num_layers=1"))
    monkeypatch.setattr(table, "WITHOUT_MLPS", {})
    options: dict[str, Any] = {"batch_size": 1, "lengths": [32], "steps": 1, "device": "cpu", "file": "table.csv"}
    table.peers_400m(["gla"], **options)
    (first,) = read(Path("table.csv"))
    assert float(first["tokens_per_second"]) == pytest.approx(32e3 / float(first["step_ms"]))
    capsys.readouterr()
    table.peers_400m(**options)
    rows = read(Path("table.csv"))
    assert [(row["model"], row["how"]) for row in rows] == [("gla", "eager"), ("transformer", "eager")]
    assert rows[0] == first
    assert "gla" not in capsys.readouterr().out


@pytest.mark.parity
@pytest.mark.parametrize("name", table.OF_TRANSFORMERS)
def test_models_of_transformers_have_the_same_size(name: str):
    pytest.importorskip("transformers")
    meta = torch.device("meta")
    ours = build(parsed([f"{name}.yaml", overlays()[name]]), "32-true", meta)
    theirs = peers.model_of_transformers(table.OF_TRANSFORMERS[name], ours, meta).build()
    assert sum(x.numel() for x in theirs.parameters()) == ours.num_parameters()
