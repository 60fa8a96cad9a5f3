"""`reproductions/performance.py`: jobs with rows are not measured again, and one that fails costs no other rows."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reproductions import bench, beside, performance
from reproductions.write_csv import read
from tests.command_lines import check_tool
from zoo.config import KEYS
from zoo.config.command_line import Keys, arguments_of
from zoo.performance.command import KINDS


class Machine:
    """Takes the place of processes: writes what they would write, and remembers their arguments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ran: list[str] = []
        self.crashes: set[str] = set()  # parts of the arguments of what crashes
        self.wrong: set[str] = set()
        self.slow = False
        monkeypatch.setattr(performance.subprocess, "run", self.run)

    def run(self, command: list[str], timeout: float | None, **options: Any) -> Any:
        line = " ".join(command[1:])
        self.ran.append(line)
        if any(text in line for text in self.crashes):
            return SimpleNamespace(returncode=-9)
        if self.slow:
            assert timeout is not None
            raise subprocess.TimeoutExpired(command, timeout)
        paths = dict(argument.removeprefix("--").split("=", 1) for argument in command if "=" in argument)
        rows = [{"ms": len(self.ran)}]
        record = {"kind": "kernels", "device": "a card", "torch": "2", "triton": "3", "rows": rows}
        (Path(paths["folder"]) / "bench.json").write_text(json.dumps(record))
        return SimpleNamespace(returncode=int(any(text in line for text in self.wrong)))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def measure(folder: Path, *parts: str, **options: Any) -> list[str]:
    return performance.performance([*parts] or None, True, "cpu", commit="abc", folder=str(folder), **options)


def test_every_row_says_where_it_comes_from(tmp_path: Path, machine: Machine):
    assert not measure(tmp_path)
    files = {file.stem: read(file) for file in tmp_path.glob("*.csv")}
    parts = ("loss", "attention", "training", "decode", "expansion", "kernels", "flashqla")
    assert {*files} == {f"performance_{part}" for part in parts}
    for name, rows in files.items():
        for row in rows:
            assert row["part"] == name.removeprefix("performance_")
            assert row["commit"] == "abc"
            assert all(row[key] for key in ("job", "date", "device", "torch"))
    assert len(files["performance_flashqla"]) == len(performance.FLASHQLA)


def test_what_was_measured_is_kept(tmp_path: Path, machine: Machine):
    assert not measure(tmp_path, "kernels/linear_head")
    first = read(tmp_path / "performance_kernels.csv")
    assert [row["job"] for row in first] == ["linear_head"]
    machine.crashes = {"--ops=[delta_rule]"}
    machine.wrong = {"linear_constant"}
    failed = measure(tmp_path, "kernels")
    assert [line.split(":")[0] for line in failed] == ["kernels/delta_rule", "kernels/linear_constant"]
    assert "ended with -9; see" in failed[0]
    assert "a result was wrong; see" in failed[1]
    assert sum("linear_head" in line for line in machine.ran) == 1
    both = read(tmp_path / "performance_kernels.csv")
    assert [row["job"] for row in both] == ["linear_head", "linear_channel"]
    assert both[0] == first[0]
    assert "linear_channel" in (tmp_path / "jobs" / "kernels-linear_channel.log").read_text()
    machine.crashes = machine.wrong = set()
    assert not measure(tmp_path, "kernels")
    assert len(read(tmp_path / "performance_kernels.csv")) == len(performance.RECURRENCES)


@pytest.mark.parametrize("tiny", [False, True])
def test_the_commands_exist(tiny: bool):
    """A test runs the benchmarks themselves; here their options are parsed."""
    for job in performance.jobs(tiny, peers=not tiny):
        script, *rest = [*job.arguments, "--device=cpu", "--folder=x"]
        if script == "cli.py":
            keys = None if rest[1] == "kernels" else Keys(KEYS, lambda parser: None)
            arguments_of(KINDS[rest[1]], rest[2:], "bench", keys)
        elif script in ("reproductions/bench.py", performance.BESIDE):
            kinds = bench.KINDS if script == "reproductions/bench.py" else beside.KINDS
            keys = None if rest[0] == "kernels" else Keys(KEYS, lambda parser: None)
            arguments_of(kinds[rest[0]], rest[1:], "bench", keys)
        else:
            check_tool(["python", script, *rest])
