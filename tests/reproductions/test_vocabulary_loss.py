"""`reproductions/vocabulary_loss.py`: both losses are right before they are timed."""

import json
from pathlib import Path

import pytest
import torch

from reproductions import vocabulary_loss as script

SMALL = {"tokens": 40, "hidden_size": 16, "vocab_size": 30, "seconds": 0.02, "device": "cpu"}


def test_both_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    assert script.main([*options, f"--folder={tmp_path}"]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["implementation"] for row in rows] == ["ours", "all logits"]
    assert all(row["ms"] > 0 and row["gate"]["passed"] for row in rows)
    assert "all logits" in capsys.readouterr().out


def test_a_wrong_loss_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def wrong(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 1.01 * script.all_logits(x, weight, labels)

    monkeypatch.setitem(script.LOSSES, "ours", wrong)
    report = script.vocabulary_loss(**SMALL, folder=str(tmp_path))
    assert report.failed
    assert "loss is off by 1.0e-02" in report.rows[0]["note"]
    assert report.rows[0]["ms"] is None
    assert report.rows[1]["ms"] > 0
    assert "WRONG" in [*report.table().columns[1].cells]
