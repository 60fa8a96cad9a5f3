"""Times of recurrences at steep decays."""

from pathlib import Path

import pytest
import torch

from reproductions import steep_decays
from reproductions.write_csv import read


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


def test_ratios_of_measured_rows_are_to_the_first_row_of_their_case():
    first: dict[tuple[str, str], dict[str, str]] = {}
    for row in read(Path(steep_decays.__file__).parent / "measured" / "decays_ops_h200.csv"):
        base = first.setdefault((row["op"], row["case"]), row)
        for passes in ("forward", "both"):
            ratio = float(row[f"{passes}_ms"]) / float(base[f"{passes}_ms"])
            assert float(row[f"{passes}_ratio"]) == pytest.approx(ratio, rel=0.01), row
