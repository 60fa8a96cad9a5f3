"""The commands of all rows parse, and what they name exists."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from reproductions.page import Row, read_papers
from tests.command_lines import check_options, check_parses, check_tool
from tests.commands import Command
from zoo.config import CONFIGS

ROWS: list[Row] = [row for paper in read_papers() for row in paper.rows.values()]
MEASURED = [row.ours.command for row in ROWS if row.ours is not None]
COMMANDS = [*dict.fromkeys(line for line in [*MEASURED, *(line for row in ROWS for line in row.commands or [])])]
OURS = [line for line in COMMANDS if line.startswith("python cli.py")]
QUICK = ("evaluate", "statex")  # of models and folders that a reader has by then: their options and tasks


def test_commands_are_of_the_command_line_or_of_scripts_and_tests_that_exist():
    assert len(OURS) > 50
    for line in {*COMMANDS} - {*OURS}:
        assert line.startswith(("pytest ", "python tutorials/", "python reproductions/"))
        check_tool(shlex.split(line))


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in OURS if line.split()[2] in QUICK])
def test_what_is_evaluated_and_grown_exists(line: str):
    check_options(shlex.split(line)[2:])


def _cases() -> list[Any]:
    """The commands that are parsed; those that differ in numbers alone from one before are nightly."""
    cases, seen = [], set()
    for line in OURS:
        if line.split()[2] not in QUICK:
            shape = re.sub(r"\d+", "0", line)
            cases.append(pytest.param(line, marks=pytest.mark.nightly if shape in seen else pytest.mark.slow))
            seen.add(shape)
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("line", _cases())
def test_a_command_parses(line: str, command: Command, finished: Path, desk: Path, tmp_path: Path):
    arguments = shlex.split(line)[2:]
    for folder in {argument.partition("/")[0] for argument in arguments if argument.endswith("/config.yaml")}:
        (desk / folder).mkdir()  # exported or grown by the command before
        shutil.copy(CONFIGS / "gla.yaml", desk / folder / "config.yaml")
    for file in (argument for argument in arguments if argument.startswith("reproductions/")):
        (desk / file).parent.mkdir(exist_ok=True)
        shutil.copy(CONFIGS.parent / file, desk / file)
    check_parses(arguments, command, finished, tmp_path)
