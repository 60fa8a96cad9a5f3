"""Times of recurrences at steep decays."""

from pathlib import Path

import pytest
import torch

from reproductions import steep_decays
from reproductions.write_csv import read
from zoo.config.command_line import arguments_of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        steep_decays,
        "CASES",
        {
            "fast": steep_decays.Case(1, 70, 1, 16, 16),
            "packed": steep_decays.Case(2, 70, 1, 16, 16, torch.float32, True),
        },
    )


def test_rows(tmp_path: Path):
    file = tmp_path / "rows.csv"
    steep_decays.steep_decays(device="cpu", each=0.001, file=str(file))
    rows = read(file)
    assert len(rows) == 2 * 2 * len(steep_decays.DECAYS)
    assert {row["both_ratio"] for row in rows if row["decays"] == "-0.05"} == {"1.0"}
    assert all(float(row["both_ms"]) > 0 for row in rows)


@pytest.mark.parametrize("kind", steep_decays.DECAYS)
def test_log_decays(kind: str):
    g = steep_decays.log_decays(kind, (1, 50, 2, 16), torch.device("cpu"))
    assert g.shape == (1, 50, 2, 16)
    assert (g <= 0).all()
    assert (g == -torch.inf).any() == (kind == "inf 5%")


def test_decays_are_numbers_or_names(tmp_path: Path):
    file = tmp_path / "rows.csv"
    _, options = arguments_of(steep_decays.steep_decays, ["--decays=[-5,inf 5%,-0.05]", "--cases=[fast]"], "rows")
    steep_decays.steep_decays(**options | {"ops": ["delta_rule"], "device": "cpu", "each": 0.001, "file": str(file)})
    assert [row["decays"] for row in read(file)] == ["-5", "inf 5%", "-0.05"]
