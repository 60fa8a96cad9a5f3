"""`reproductions/context_parallel_speed.py`: one device and two that share each sequence, eager and captured."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kernels import UserError
from reproductions import context_parallel_speed as speed
from reproductions import write_csv
from tests.zoo.train.test_captured_step import Repeated

MODEL = ["gated_deltanet.yaml", "model.hidden_size=32", "model.num_heads=1", "model.num_layers=2"]
OPTIONS = {"model": MODEL, "document": 16, "rows": 3, "steps": 2, "device": "cpu"}
FORKED = {"start_method": "forkserver"}
WORK = speed.work


def work_repeated(rank: int, cells: Sequence[speed.Cell], to: speed.Settings, store: str) -> None:
    """One process of two, in which a repetition takes the place of a graph."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speed, "Recorder", lambda device: Repeated())
        WORK(rank, cells, to, store)


@pytest.mark.slow
def test_cells_of_one_and_of_two_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(speed, "work", work_repeated)
    speed.mp.get_context("forkserver").set_forkserver_preload([__name__])  # imported once for both processes
    start = speed.mp.start_processes
    monkeypatch.setattr(speed.mp, "start_processes", lambda *args, **options: start(*args, **options | FORKED))
    file = tmp_path / "speed.csv"
    options = OPTIONS | {"file": str(file), "recomputed": [64], "layouts": ["packed"]}
    speed.context_parallel_speed(lengths=[64], modes=["captured", "eager"], **options)
    rows = write_csv.read(file)
    assert [(row["mode"], row["gpus"], row["checkpointing"]) for row in rows] == [
        (mode, gpus, "1") for mode in ("captured", "eager") for gpus in ("1", "2")
    ]
    for row in rows:
        assert float(row["tokens_per_second"]) == pytest.approx(64e3 / float(row["step_ms"]))
        assert row["note"] == ""
    for captured, eager in zip(rows[:2], rows[2:], strict=True):
        assert captured["losses"] == eager["losses"]
        assert len(set(captured["losses"].split())) == OPTIONS["rows"] + 1 + 2
    assert capsys.readouterr().out.count(" of twice one GPU, ") == 2


def row(gpus: int, losses: str, tokens_per_second: object = 100.0) -> speed.Row:
    cell = dict(zip(speed.CELL, speed.Cell("eager", 64, False, "whole", 0, gpus).key, strict=True))
    return cell | {"tokens_per_second": tokens_per_second, "losses": losses, "peak_gib": 4 / gpus, "note": ""}


def test_two_devices_are_compared_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "speed.csv"
    options = OPTIONS | {"lengths": [64], "layouts": ["whole"], "file": str(file)}
    write_csv.write([row(1, "4.0 2.0"), row(2, "4.0 2.0001", 190.0)], file, speed.COLUMNS)
    speed.context_parallel_speed(**options)
    assert capsys.readouterr().out == (
        "eager 64 0 whole 0: 0.950 of twice one GPU, memory 0.500, losses differ 5.0e-05\n"
    )
    write_csv.write([row(1, "4.0 2.0"), row(2, "4.0 2.1", 190.0)], file, speed.COLUMNS)
    with pytest.raises(UserError, match=r"losses of one and of two GPUs differ by 5.0e-02; rounding allows 0.0001"):
        speed.context_parallel_speed(**options)


def test_times_are_medians_of_steps():
    intervals = [1, 2, 3, 4, 2, 3, 4, 5, 9, 9, 9, 9]
    assert speed.times(intervals, 14) == {
        "tokens_per_second": 1000,
        "step_ms": 14,
        "slowest_ms": 36,
        "forward_ms": 2,
        "backward_ms": 3,
        "update_ms": 9,
    }
