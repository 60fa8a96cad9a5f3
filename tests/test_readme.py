"""What README.md says is so: its commands are commands."""

import inspect
import re
from pathlib import Path

import pytest

import mixers

from .command_lines import check_parses, commands_of
from .commands import ROOT, Command
from .zoo.saved.public.public_folder import write

pytest_plugins = "tests.desk"

README = ROOT / "README.md"
LONGEST = 200  # lines of a mixer, as README says


COMMANDS = {" ".join(words): words[2:] for words in commands_of(README.read_text()) if words[1] == "cli.py"}


@pytest.mark.skipif(not README.read_text().strip(), reason="README.md is not written yet")
def test_there_are_commands():
    assert any(" fit --config gdn_h2.yaml" in line for line in COMMANDS)


def test_a_mixer_is_as_short_as_readme_says():
    assert f"of at most {LONGEST} lines" in " ".join(README.read_text().split())
    files = {inspect.getfile(mixers.get(name)) for name in mixers.names()}
    assert max(len(Path(file).read_text().splitlines()) for file in files) <= LONGEST


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_parses(
    line: str, command: Command, finished, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    arguments = [*COMMANDS[line]]
    named = [argument for argument in arguments if re.match(r"(.*=)?runs/", argument)]
    if named:  # of a run that the reader has by then; here there is another one
        monkeypatch.chdir(finished)
        arguments = [re.sub(r"runs/[^/]+", "runs/done", argument) for argument in arguments]
    if arguments and arguments[0] == "convert":
        write(tmp_path / "desk" / "some-hf-folder")
    elif arguments and arguments[0] == "generate":
        arguments.append("--max_new_tokens=1")
    elif arguments and arguments[0] == "evaluate":
        arguments.append("--samples=1")
    check_parses(arguments, command, finished, tmp_path)
