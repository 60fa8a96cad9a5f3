"""`reproductions/linear_kl.py`: implementations are right before they are timed."""

import csv
from pathlib import Path

import pytest
from torch import Tensor

from reproductions import linear_kl as script

SMALL = {"tokens": 12, "hidden_size": 16, "vocab_size": 30, "seconds": 0.02, "device": "cpu"}


def test_each_implementation_has_a_row(tmp_path: Path):
    pytest.importorskip("triton")
    rows = script.linear_kl(**SMALL, table=str(tmp_path / "kl.csv"))
    with (tmp_path / "kl.csv").open(encoding="utf-8", newline="") as file:
        written = [*csv.DictReader(file)]
    assert [row["implementation"] for row in written] == ["plain", "torch", "triton"]
    assert all(row["ms"] > 0 and row["error"] < 1e-5 and not row["note"] for row in rows)


def test_a_wrong_implementation_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def wrong(how: str, *args: Tensor, right=script.divergence) -> Tensor:  # type: ignore[no-untyped-def]
        return right(how, *args) * (1.01 if how == "torch" else 1)

    monkeypatch.setattr(script, "divergence", wrong)
    plain, in_torch, _ = script.linear_kl(**SMALL, table=str(tmp_path / "kl.csv"))
    assert "loss is off by 1.0e-02" in in_torch["note"]
    assert in_torch["ms"] is None
    assert plain["ms"] > 0
