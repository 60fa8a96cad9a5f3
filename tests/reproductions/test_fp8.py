"""`reproductions/fp8.py`: a row for each kind of products, which differ in their results."""

from pathlib import Path

import pytest
import torch

from kernels import UserError
from reproductions import fp8, write_csv
from zoo.performance.model import build, read

SMALL = [
    "gated_deltanet.yaml",
    "model.num_layers=1",
    "model.hidden_size=256",
    "model.num_heads=2",
    "model.vocab_size=32",
]


def test_both_kinds_of_products_get_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "fp8.csv"
    fp8.main(SMALL, batch_size=1, length=16, rounds=2, steps=2, device="cpu", file=str(file))
    rows = write_csv.read(file)
    assert [row["products"] for row in rows] == ["bf16", "fp8"]
    assert all(int(row["tokens_per_second"]) > 0 for row in rows)
    assert 2 * float(rows[0]["error"]) < float(rows[1]["error"]) < fp8.LARGEST
    monkeypatch.setattr(fp8, "LARGEST", 0.01)
    with pytest.raises(UserError, match=r"fp8: gradients is off by .*; nothing was timed"):
        fp8.main(SMALL, batch_size=1, length=16, rounds=2, steps=2, device="cpu", file=str(tmp_path / "wrong.csv"))
    assert not (tmp_path / "wrong.csv").exists()
    with pytest.raises(UserError, match="rounds and steps at least 2"):
        fp8.main(SMALL, rounds=1)


def test_products_are_switched_on_and_off():
    torch.manual_seed(0)
    model = build(read(SMALL), "bf16-mixed", torch.device("cpu"))
    tokens, seen = torch.arange(16)[None], []
    for on in (False, True, False):
        fp8.set_products(model, on)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            seen.append(model(tokens)[0])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])
