"""Where a test run's processor time goes: CPU seconds of each directory, with those of all started processes.

The rows add up to what all processes of the run have used. `pytest --cpu-seconds=FILE` also writes the seconds of each
test to a JSON file.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

START = "(imports and collection)"
TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def cpu_seconds() -> float:
    """Used so far by this process, its children that have ended, and (on Linux) those that live, with their own."""
    return sum(os.times()[:4]) + sum(map(_used, _children()))


def _children() -> list[str]:
    tasks = Path("/proc/self/task")
    actual: list[str] = []
    for task in tasks.iterdir() if tasks.is_dir() else ():
        try:
            actual += (task / "children").read_text().split()
        except OSError:  # a thread that has just ended
            continue
    return actual


def _used(number: str) -> float:
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0.0
    return sum(map(int, fields[11:15])) / TICK


def _folder(test: str) -> str:
    return "/".join(PurePosixPath(test.partition("::")[0]).parts[:-1][:3])


class CpuSeconds:
    """Counts in each worker, and adds up in the process that the user started."""

    def __init__(self, config: pytest.Config) -> None:
        self._output: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._file: str | None = config.getoption("--cpu-seconds")
        self._seconds: Counter[str] = Counter()

    def pytest_collection_finish(self) -> None:
        self._seconds[START] = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = cpu_seconds()
        result = yield
        self._seconds[item.nodeid] += cpu_seconds() - before
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        rest = cpu_seconds() - self._seconds.total()
        self._seconds["(the rest)"] = max(rest, 0.0)
        if self._output is not None:
            self._output["cpu_seconds"] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: Counter[str] = Counter()
        for name, seconds in self._seconds.items():
            folders[name if name.startswith("(") else _folder(name)] += seconds
        terminalreporter.section("CPU seconds")
        for name, seconds in [*folders.most_common(), ("total", folders.total())]:
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        if self._file is not None:
            Path(self._file).write_text(json.dumps(dict(self._seconds.most_common()), indent=1) + "\n")
