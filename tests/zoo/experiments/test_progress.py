"""The progress of several runs, on a terminal and in a log file."""

import io
import json
import sys
from pathlib import Path

import pytest
from jsonargparse import Namespace

from zoo.experiments import Run
from zoo.experiments.progress import RunBars

STEPS = Namespace(trainer=Namespace(max_steps=60))
RUNS = [Run("gla", (), parsed=STEPS), Run("retnet", (), parsed=STEPS), Run("a" * 40, (), parsed=STEPS)]


@pytest.fixture(autouse=True)
def no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have run a notebook, where bars are different."""
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def write_metrics(folder: Path) -> None:
    (folder / "gla").mkdir()
    rows = [{"step": 9, "train_loss": 6.5}, {"step": 19, "train_loss": 6.25, "minutes_left": 2.2}, {"step": 19}]
    lines = [json.dumps(row) for row in rows]
    (folder / "gla" / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 29, "tra']))


def watch(folder: Path) -> None:
    with RunBars(folder, RUNS, 0) as bars:
        for run in RUNS:
            bars.start(run)
        write_metrics(folder)
        bars.refresh()
        bars.end(RUNS[1], failed=True)


def test_in_a_log_file_they_are_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zoo.display.LOG_SECONDS", 0.0)
    watch(tmp_path)
    shown = capsys.readouterr().err
    assert "\r" not in shown
    line = next(line for line in shown.splitlines() if "gla: step" in line)
    assert line.startswith("runs: 0/3, ")
    assert "gla: step 20 of 60, loss 6.250, 2 min left; retnet: starting" in line
    assert line.endswith(f"logs: {tmp_path}/NAME.log")
    assert "1 failed" in shown.splitlines()[-1]


def test_on_a_terminal_each_has_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "100")
    watch(tmp_path)
    shown = terminal.getvalue()
    assert "gla                              20/60 |" in shown
    assert "loss 6.250, 2 min left" in shown
    assert f"{'a' * 31}… 0/60 |" in shown
