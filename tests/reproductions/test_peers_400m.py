"""`reproductions/peers_400m.py`: speeds of our models and of others, which are measured once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import UserError
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


@pytest.mark.parametrize("too_large", ["captured", "peer", "eager"])
def test_batches_are_halved_unless_only_the_eager_steps_do_not_fit(too_large: str, monkeypatch: pytest.MonkeyPatch):
    def bench(config: list[str], batch_size: int, *rest: object, **options: object) -> table.Report:
        names = {"captured": "gla", "peer": "fla gla", "eager": "eager"}
        rows = [{"model": name} | dict.fromkeys(table.SPEED, 1.0) for name in names.values()]
        if batch_size > 2:
            rows[[*names].index(too_large)]["note"] = table.DOES_NOT_FIT
        return table.Report(Path(), dict.fromkeys(table.SETTINGS, "x"), rows)

    monkeypatch.setattr(table, "bench_training", bench)
    rows = table.speeds_of(["gla.yaml"], 8, 16, 1, torch.device("cpu"))
    assert {row["batch_size"] for row in rows} == {8 if too_large == "eager" else 2}
    assert [bool(row["note"]) for row in rows] == [False, False, too_large == "eager"]


def test_a_model_with_wrong_gradients_is_an_error_and_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    row = dict.fromkeys(table.COLUMNS) | {"how": "eager", "length": 16, "note": "gradients are wrong"}
    monkeypatch.setattr(table, "speeds_of", lambda *_: [dict(row)])
    options: dict[str, Any] = {"lengths": [16], "device": "cpu", "file": str(tmp_path / "table.csv")}
    with pytest.raises(UserError, match=r"^gla, 16: gradients are wrong$"):
        table.peers_400m(["gla"], **options)
    row |= {"note": None, "tokens_per_second": 5.0}
    table.peers_400m(["gla"], **options)
    assert [row["tokens_per_second"] for row in read(tmp_path / "table.csv")] == ["5.0"]


@pytest.mark.parity
@pytest.mark.parametrize("name", table.OF_TRANSFORMERS)
def test_models_of_transformers_have_the_same_size(name: str):
    pytest.importorskip("transformers")
    meta = torch.device("meta")
    ours = build(parsed([f"{name}.yaml", overlays()[name]]), "32-true", meta)
    theirs = peers.model_of_transformers(table.OF_TRANSFORMERS[name], ours, meta).build()
    assert sum(x.numel() for x in theirs.parameters()) == ours.num_parameters()


def test_unknown_models_are_refused():
    with pytest.raises(UserError, match=r"^models: 'gal' is not one of "):
        table.peers_400m(["gal"])
