"""Every command in the documentation is one: its verb, keys, values, configs, tasks, tests, markers and files exist.

Not here: those of README, most of which are run (`test_readme.py`), of the blocks of tutorials, all of which are run
or parsed (`test_tutorials.py`), of configs (`test_config_commands.py`, `test_shipped_sweeps.py`), and of reproductions
(`test_commands.py` there).
"""

import re
import shutil
from pathlib import Path

import pytest

import zoo
from kernels import UserError
from zoo.config import CONFIGS

from .command_lines import SHELLS, check_options, check_parses, check_tool, commands_of, takes_no_config
from .commands import ROOT, Command

RENDERED = "reproductions"  # pages from rows, whose commands are tested
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOUND = {
    **{page: commands_of(page.read_text(), (*SHELLS, "text")) for page in PAGES if not page.name.startswith(RENDERED)},
    **{page: commands_of(page.read_text(), ["text"]) for page in sorted((ROOT / "tutorials").glob("*.md"))},
    ROOT / "README.md": [words for words in commands_of((ROOT / "README.md").read_text()) if words[1] != "cli.py"],
}
COMMANDS = {
    f"{page.name}: {' '.join(words)}": words
    for page, actual in FOUND.items()
    for words in actual
    if words[-1] != "…"  # of a command that is only begun
}
OURS = {name: words[2:] for name, words in COMMANDS.items() if words[1:2] == ["cli.py"] and len(words) > 2}
WITH_CONFIGS = {name: words for name, words in OURS.items() if not takes_no_config(words)}
ONCE = {tuple(words): name for name, words in reversed(WITH_CONFIGS.items())}  # the first page that has it


def test_they_are_found():
    for page, words in {
        "evaluation.md": ["python", "cli.py", "evaluate", "--tasks=list"],  # in a block
        "kernels.md": ["python", "-m", "dev.tune", "delta_rule.dq", "128", "bf16"],  # in the running text
        "CONTRIBUTING.md": ["pytest", "-m", "gpu", "tests/kernels"],
        "commands.md": ["pip", "install", "-e", ".[scaling]"],  # in a table
    }.items():
        assert f"{page}: {' '.join(words)}" in COMMANDS
    assert "06_an_ablation.md" not in "".join(WITH_CONFIGS)  # since test_tutorials.py has its blocks
    assert len(COMMANDS) > 60


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, words in OURS.items() if takes_no_config(words)])
def test_its_options_exist(name: str):
    check_options(OURS[name])


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in OURS])
def test_what_another_tool_is_to_use_exists(name: str):
    check_tool(COMMANDS[name])


@pytest.fixture(scope="session")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `scaling plan` has written."""
    folder = tmp_path_factory.mktemp("scaling") / "planned"
    zoo.scaling.plan("gla,transformer", budget=1e18, output=folder, verbose=False)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ONCE.values())
def test_it_parses(
    name: str,
    command: Command,
    finished: Path,
    desk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
):
    words = [word.replace("runs/planned/", "planned/") for word in WITH_CONFIGS[name]]
    if any("runs/" in word for word in words):  # a run that the reader has by then
        monkeypatch.chdir(finished)
        words = [re.sub(r"runs/[\w-]+", "runs/done", word) for word in words]
    for word in words:  # what the commands before have made
        if word.startswith(("ladder/", "planned/")):
            shutil.copytree(request.getfixturevalue("planned"), word.partition("/")[0], dirs_exist_ok=True)
        elif word.endswith("/config.yaml") and not Path(word).exists():
            (desk / word).parent.mkdir()
            shutil.copy(CONFIGS / "gla.yaml", desk / word)
        elif word.startswith("reproductions/"):
            (desk / word).parent.mkdir()
            shutil.copy(ROOT / word, desk / word)
    (Path.cwd() / "corpus").mkdir(exist_ok=True)
    (Path.cwd() / "corpus" / "text.txt").write_text("a text of the reader's own\n" * 1000)
    check_parses(words, command, finished, tmp_path)


WRONG = [
    "python cli.py fit --config gdn_h2.yaml --model.hiden_size=64",
    "python cli.py fit --config gdn_h3.yaml",
    "python cli.py sweep --config sweep/heads.yaml --job=2",
    "python cli.py evaluate --checkpoint runs/first --tasks=passkeys",
    "python cli.py convert --checkpoint a --output b --too=fla",
    "python cli.py fitt --config gla.yaml",
    "python -m zoo.nowhere",
    "python tutorials/run.py tutorials/01_first_hybrid.md --tiny",
    "pytest -m gpus tests/kernels",
    "pytest tests/kernels/test_nothing.py",
    "pytest tests/test_configs.py::test_nothing",
    'pip install -e ".[scalings]"',
]


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_one_is_noticed(line: str, command: Command, finished: Path, tmp_path: Path):
    [words] = commands_of(f"Then `{line}` does it.")
    with pytest.raises((AssertionError, UserError, FileNotFoundError, ModuleNotFoundError)):
        check(words, command, finished, tmp_path)


def check(words: list[str], command: Command, finished: Path, folder: Path) -> None:
    if words[1] != "cli.py":
        check_tool(words)
    elif takes_no_config(words[2:]):
        check_options(words[2:])
    else:
        check_parses(words[2:], command, finished, folder)
