"""`reproductions/mixers_400m.py`: sizes of all models, and speeds that are measured once."""

from pathlib import Path

import pytest

from reproductions import mixers_400m as table
from reproductions.write_csv import read


@pytest.mark.slow
def test_speeds_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "overlays", lambda: dict.fromkeys(("gla", "transformer"), "model.num_layers=2"))
    options = {"batch_size": 1, "length": 32, "steps": 1, "device": "cpu", "file": "table.csv"}
    table.mixers_400m(**options)
    gla, attention = read(tmp_path / "table.csv")
    assert (gla["model"], gla["grows"], attention["grows"]) == ("gla", "0", "1")
    assert int(attention["state"]) == 2 * 2 * 32 * 192  # keys and values of two layers
    table.mixers_400m(["gla"], speed=True, **options)
    first = read(tmp_path / "table.csv")[0]
    assert float(first["tokens_per_second"]) == pytest.approx(32e3 / float(first["step_ms"]))
    capsys.readouterr()
    table.mixers_400m(speed=True, **options)
    both = read(tmp_path / "table.csv")
    assert both[0] == first
    assert both[1]["tokens_per_second"]
    assert "gla" not in capsys.readouterr().out


def test_the_table_has_every_model_of_400m():
    assert {line["model"]: line["overlay"] for line in read(table.MEASURED)} == table.overlays()


@pytest.mark.slow
@pytest.mark.parametrize("line", read(table.MEASURED), ids=lambda line: line["model"])
def test_the_sizes_of_the_table(line: dict[str, str]):
    sizes = table.sizes_of([f"{line['model']}.yaml", line["overlay"]], 4096)
    assert {key: str(value) for key, value in sizes.items()} == {key: line[key] for key in sizes}
