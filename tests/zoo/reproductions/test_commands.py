"""The commands of all rows parse, and what they name exists."""

import shlex
import shutil
from pathlib import Path

import pytest

import zoo
from tests.command_lines import check_parses
from tests.commands import ROOT, Command
from zoo.config import CONFIGS
from zoo.config.command_line import arguments_of
from zoo.evaluation.catalogue import tasks_of
from zoo.evaluation.task import Options
from zoo.reproductions import Row, read_papers

pytest_plugins = "tests.desk"

ROWS: list[Row] = [row for paper in read_papers() for row in paper.rows.values()]
MEASURED = [row.ours.command for row in ROWS if row.ours is not None]
COMMANDS = [*dict.fromkeys(line for line in [*MEASURED, *(line for row in ROWS for line in row.commands or [])])]
OURS = [line for line in COMMANDS if line.startswith("python cli.py")]
QUICK = ("evaluate", "statex")  # of models and folders that a reader has by then: their options and tasks


def test_commands_are_of_the_command_line_or_of_tests_that_exist():
    assert len(OURS) > 50
    for line in {*COMMANDS} - {*OURS}:
        pytest_, *files = shlex.split(line)
        assert pytest_ == "pytest"
        assert all((ROOT / file.partition("::")[0]).is_file() for file in files), line


@pytest.mark.parametrize("line", [line for line in OURS if line.split()[2] in QUICK])
def test_what_is_evaluated_and_grown_exists(line: str):
    _, _, verb, *arguments = shlex.split(line)
    _, options = arguments_of(getattr(zoo, verb), arguments, verb)
    if verb == "evaluate":
        names = options["tasks"] if isinstance(options["tasks"], list) else options["tasks"].split(",")
        assert tasks_of(names, Options(data=options["data"]))


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in OURS if line.split()[2] not in QUICK])
def test_a_command_parses(line: str, command: Command, desk: Path, tmp_path: Path):
    arguments = shlex.split(line)[2:]
    for folder in {argument.partition("/")[0] for argument in arguments if argument.endswith("/config.yaml")}:
        (desk / folder).mkdir()  # exported or grown by the command before
        shutil.copy(CONFIGS / "gla.yaml", desk / folder / "config.yaml")
    check_parses(arguments, command, tmp_path)
