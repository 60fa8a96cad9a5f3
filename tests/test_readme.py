"""README.md is short, its commands are commands, and its mixer trains."""

import inspect
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

import mixers
from zoo.train.results import read_row

from .command_lines import check_parses, commands_of
from .commands import ROOT, Command
from .zoo.saved.public.public_folder import write

README = ROOT / "README.md"
LONGEST = 200  # lines of a mixer, as README says
MIXER = "runs.my_mixers.Forgetful"

COMMANDS = {" ".join(words): words[2:] for words in commands_of(README.read_text()) if words[1] == "cli.py"}


def test_there_are_commands():
    assert any(" fit --config gdn_h2.yaml" in line for line in COMMANDS)


def test_a_mixer_is_as_short_as_readme_says():
    assert f"of at most {LONGEST} lines" in " ".join(README.read_text().split())
    files = {inspect.getfile(mixers.get(name)) for name in mixers.names()}
    assert max(len(Path(file).read_text().splitlines()) for file in files) <= LONGEST


def test_it_is_read_in_minutes():
    text = re.sub(r"<!--.*?-->", "", README.read_text(), flags=re.DOTALL)
    assert 600 <= len(text.split()) <= 900


def test_the_badges_are_true():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = re.findall(r"shields.io/badge/([^)]+)-\w+\)", README.read_text())
    said = {f"licence-{project['license'].replace('-', '--')}", f"python-≥{project['requires-python'].lstrip('>=')}"}
    assert {unquote(badge) for badge in badges} == said


@pytest.fixture
def own_mixer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The current folder has README's mixer in the file that README names."""
    [code] = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) <= 30
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "my_mixers.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("runs.my_mixers", "runs"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_its_mixer_is_checked_trained_and_expanded(own_mixer: None, command: Command, finished: Path):
    assert "expanded with subheads: causality" in mixers.check_mixer(pkgutil.resolve_name(MIXER))
    lines = [line for line in COMMANDS if MIXER in line]
    assert len(lines) == 2
    for number, line in enumerate(lines):
        small = ["--model.num_layers=2", "--trainer.max_steps=3", "--optim.warmup_steps=1", f"--run=run-{number}"]
        small += ["--trainer.limit_val_batches=1", f"--data.tokenizer={finished}/runs/done/tokenizer.json"]
        command(*COMMANDS[line], *small, "--data.max_characters=300000").ok()
    sizes = [read_row(Path("runs", f"run-{number}"))["state_size"] for number in range(2)]
    assert sizes[1] == 4 * sizes[0]


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in COMMANDS if MIXER not in line])
def test_a_command_of_the_readme_parses(
    line: str, command: Command, finished, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    arguments = [*COMMANDS[line]]
    if "runs/NAME" in line:  # a run that the reader has by then
        monkeypatch.chdir(finished)
        arguments = [argument.replace("runs/NAME", "runs/done") for argument in arguments]
    if arguments and arguments[0] == "convert":
        write(tmp_path / "desk" / "some-hf-folder")
    elif arguments and arguments[0] == "generate":
        arguments.append("--max_new_tokens=1")
    elif arguments and arguments[0] == "evaluate":
        arguments.append("--samples=1")
    check_parses(arguments, command, finished, tmp_path)
