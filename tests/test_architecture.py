"""Rules of the house that no other test would notice."""

import ast
import functools
import graphlib
import importlib
import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernels
import mixers

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "mixers", "zoo")
OUTSIDE = {"transformers", "fla", "lm_eval"}
# run by transformers, from the folders that `convert --to=transformers` writes; nothing here imports it
MODELLING = "zoo/saved/public/modeling_zoo.py"
# kernels ← mixers ← zoo ← cli: what a package must not import, wherever in the file
FORBIDDEN = {
    "kernels": {"mixers", "zoo", "cli", "torch.nn.modules", "lightning", "tokenizers", "jsonargparse", "yaml"},
    "mixers": {"zoo", "cli", "lightning", "pytorch_lightning", "tokenizers", "jsonargparse", "yaml", "deepspeed"},
    "zoo": {"cli"},
    "cli.py": set(),
}
# the rooms of zoo: each imports only from those before it
ROOMS = (
    "zoo.files",
    "zoo.arguments",
    "zoo.display",
    "zoo.lm",
    "zoo.data",
    "zoo.generation",
    "zoo.checkpoints",
    "zoo.train",
    "zoo.train.callbacks",
    "zoo.config",
    "zoo.saved",
    "zoo.runs",
    "zoo.inspection",
    "zoo.experiments",
    "zoo.performance",
    "zoo.evaluation",
    "zoo.scaling",
    "zoo.calls",
)


def test_the_page_lists_the_rooms_in_order():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## The subpackages of `zoo`")[2].partition("Where to look first")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    listed = [name for cell in cells for name in re.findall(r"`([\w/]+)`", cell) if "/" not in name]
    assert listed == [room.removeprefix("zoo.") for room in ROOMS if room.count(".") == 1]


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The syntax trees of all files by their paths; only to be read."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))] + [ROOT / "cli.py"]
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in files}


def imports(name: str) -> Iterator[str]:
    """Dotted names that a file imports, `from a import b` as both a and a.b; relative ones made absolute."""
    package = name.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*package[: len(package) - node.level + 1], node.module or ""] if node.level else [node.module]
            )
            yield base.strip(".")
            yield from (f"{base}.{alias.name}".strip(".") for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.slow
def test_imports_point_one_way():
    violations = []
    for name in trees():
        allowed = name.startswith(("zoo/evaluation", MODELLING))
        bad = FORBIDDEN[name.partition("/")[0]] | (set() if allowed else OUTSIDE)
        violations += [f"{name} imports {used}" for used in imports(name) if any(within(used, other) for other in bad)]
    assert not violations


def room(module: str) -> str | None:
    """The innermost room that a dotted name is in."""
    return max((room for room in ROOMS if within(module, room)), key=len, default=None)


@pytest.mark.slow
def test_no_import_runs_back_up_between_rooms():
    violations = []
    for name in trees():
        if not name.startswith("zoo/") or name in ("zoo/__init__.py", "zoo/__main__.py"):
            continue
        own = room(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        if own is None:
            violations.append(f"{name} is in no room; tests/test_architecture.py lists them in their order")
            continue
        used = {other for imported in imports(name) if (other := room(imported)) is not None}
        above = [other for other in used if ROOMS.index(other) > ROOMS.index(own)]
        violations += [f"{name} imports from {other}, which comes after {own}" for other in above]
    assert not violations


def imported_modules() -> dict[str, set[str]]:
    """Module → modules of this project that it imports, anywhere in the file, also for type checkers alone."""
    names = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in trees()}
    graph: dict[str, set[str]] = {}
    for module, name in names.items():
        graph[module] = set()
        package = name.removesuffix(".py").split("/")[:-1]
        for node in ast.walk(trees()[name]):
            if isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                both = ((f"{base}.{alias.name}", base) for alias in node.names)
                graph[module] |= {inner if inner in names else outer for inner, outer in both}
        graph[module] = (graph[module] & names.keys()) - {module}
    return graph


@pytest.mark.slow
def test_no_modules_import_each_other():
    graph = imported_modules()
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which has the circle


def test_kernels_know_no_module():
    violations = []
    for name, tree in trees().items():
        if name.startswith("kernels/"):
            violations += [
                f"{name} imports {used}" for used in imports(name) if used in ("torch.nn", "torch.nn.Module")
            ]
            classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
            violations += [f"{name}: {node.name} is a Module" for node in classes if "Module" in ast.dump(node)]
    assert not violations


def test_names_say_what_is_inside():
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "core", "base_utils"}
    assert not [name for name in trees() if Path(name).stem in vague]


# a family of public checkpoints is a declaration of what their layers are called here
DECLARATIONS = ("zoo/saved/public/families/",)


@pytest.mark.slow
def test_no_mixer_is_named_above_the_mixers():
    """What only one mixer needs goes through a hook that all mixers have."""
    violations = []
    for name in trees():
        if name.startswith(("kernels/", "mixers/", *DECLARATIONS)):
            continue
        nodes = [*ast.walk(trees()[name])]
        documented = (node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef))
        docstrings = {node.body[0].value for node in documented if ast.get_docstring(node)}  # may tell of them
        fields = (value for node in nodes if node not in docstrings for _, value in ast.iter_fields(node))
        texts = (text for value in fields for text in (value if isinstance(value, list) else [value]))
        words = {word for text in texts if isinstance(text, str) for word in re.findall(r"\w+", text)}
        # the help text shows how to ask for one by name
        named = words & ({*mixers.names()} - ({"GatedDeltaNet"} if name == "cli.py" else set()))
        violations += [f"{name} names {mixer}" for mixer in named]
    assert not violations


# assignments of functions to attributes of others, and why they are needed
REPLACED = {
    ("zoo/data/workers.py", "excepthook"),  # Python's own hook, in a process for data
    ("zoo/train/captured_passes.py", "replay"),  # a field of this project's optimisers
    ("zoo/train/zero_engine.py", "get_grad_norm_direct"),  # DeepSpeed builds that optimiser; see `norm_in_few_calls`
}


def test_no_function_of_another_library_is_replaced():
    replaced = set()
    for name, tree in trees().items():
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign):
                continue
            is_function = isinstance(node.value, ast.Lambda) or getattr(node.value, "id", None) in functions
            owners = [each for each in node.targets if isinstance(each, ast.Attribute)]
            others = [each for each in owners if getattr(each.value, "id", None) not in ("self", "cls")]
            replaced |= {(name, each.attr) for each in others if is_function}
        assert not any(module.startswith("unittest") for module in imports(name)), name  # patches are replacements, too
    assert replaced == REPLACED


# functions with more than 12 parameters: those of two configs, two commands and an op
MANY_PARAMETERS = {
    ("kernels/delta_rule/__init__.py", "delta_rule"),
    ("mixers/kda.py", "__init__"),
    ("zoo/evaluation/run.py", "evaluate"),
    ("zoo/lm/model.py", "__init__"),
    ("zoo/runs/generate.py", "generate"),
}


def test_few_functions_have_many_parameters():
    many = set()
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or any("jit" in ast.unparse(each) for each in node.decorator_list):
                continue
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            if sum(parameter.arg not in ("self", "cls") for parameter in parameters) > 12:
                many.add((name, node.name))
    assert many == MANY_PARAMETERS


def test_mixers_take_no_arbitrary_arguments():
    """A typo in a config must not vanish in **kwargs."""
    violations = []
    for name, tree in trees().items():
        if name.startswith("mixers/"):
            functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
            constructors = [function for function in functions if function.name in ("__init__", "__new__")]
            if name == "mixers/base.py":  # passes them on to `__init__`, after it has refused what is no site
                constructors = [function for function in constructors if function.name == "__init__"]
            violations += [f"{name}:{f.lineno}" for f in constructors if f.args.kwarg or f.args.vararg]
    assert not violations


def public(module) -> Iterator[object]:
    """Public functions and classes that are defined in a module."""
    for name, thing in vars(module).items():
        defined = (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__ == module.__name__
        if defined and not name.startswith("_"):
            yield thing


def modules(package) -> Iterator:
    yield package
    for actual in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield importlib.import_module(actual.name)


@pytest.mark.parametrize("package", [kernels, mixers], ids=lambda package: package.__name__)
def test_everything_public_is_documented(package):
    contract = importlib.import_module("mixers.contract")
    clauses = {*contract.CLAUSES, *contract.NOT_CAUSAL}  # their names are sentences, which the report prints
    bare = []
    for module in modules(package):
        if not module.__doc__:
            bare.append(module.__name__)
        for thing in public(module):
            # a subclass does not inherit what it is, so `inspect.getdoc` would say too much
            if not thing.__doc__ and thing not in clauses:
                bare.append(f"{module.__name__}.{thing.__name__}")
    assert not bare


def python(*arguments: str, folder: Path = ROOT, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a fresh process of Python in a folder, with changes to the environment."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run(code: str) -> str:
    """Run code in a fresh process from the repository root; returns what it printed."""
    done = python("-W", "ignore", "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_the_cpu_path_needs_neither_triton_nor_deepspeed():
    """They are not there on macOS and Windows."""
    code = """
import sys
sys.modules["triton"] = sys.modules["deepspeed"] = None  # importing them raises ImportError
import kernels, zoo, cli, torch
model = zoo.build("gdn_h2.yaml", "model.vocab_size=9", "model.num_layers=3")
model(torch.tensor([[1, 2, 3]]))[0].sum().backward()
sys.stdout.write("trained")
"""
    assert run(code) == "trained"


@pytest.mark.slow
def test_kernels_import_light():
    heavy = run("import sys, kernels; sys.stdout.write(' '.join(sys.modules))").split()
    assert not {"lightning", "transformers", "deepspeed", "jsonargparse", "mixers", "zoo", "matplotlib"} & {*heavy}


@pytest.mark.slow
def test_transformers_does_not_mistake_our_kernels_for_theirs():
    """`transformers` asks an importable `kernels` for its version, and imports names from it if that suits."""
    pytest.importorskip("transformers", reason="install the extra 'test'")
    code = "import sys, kernels; from transformers import Mamba2ForCausalLM as M; sys.stdout.write(kernels.__file__)"
    assert run(code) == str(ROOT / "kernels" / "__init__.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import sys, cli; sys.argv[1:] = ['mixers']; cli.main()",
        "import zoo",
        "import mixers",
        "import kernels, zoo.lm",
        f"import sys, kernels; sys.path.insert(0, {str(ROOT)!r}); import zoo",  # theirs are imported already
    ],
)
def test_a_namesake_that_hides_our_kernels_is_told_in_one_sentence(code: str, tmp_path: Path):
    """Hugging Face's package `kernels`, found first as in an editable installation."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    done = python("-c", code, folder=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    start = "error" if "cli.main" in code else "ImportError"
    theirs = f"kernels: {tmp_path}/kernels/__init__.py is another package of this name, such as Hugging Face's"
    advice = f"run `pip uninstall kernels`, or put this project before it: PYTHONPATH={ROOT}"
    assert done.stderr.splitlines()[-1] == f"{start}: {theirs}; {advice}"


@pytest.mark.slow
def test_files_of_a_namesake_in_place_of_our_kernels_are_told_in_one_sentence(tmp_path: Path):
    """Both were installed into one folder, as wheels are."""
    shutil.copytree(ROOT / "mixers", tmp_path / "mixers", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    done = python("-c", "import mixers", folder=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.stderr.splitlines()[-1].endswith(
        "such as Hugging Face's, which replaced this project's; install this project in an environment of its own"
    )


@pytest.mark.slow
def test_an_import_that_fails_for_another_reason_says_so():
    done = python("-c", "import sys; sys.modules['torch'] = None; import zoo")
    assert "import of torch halted" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_console_command_works_from_any_folder(tmp_path: Path):
    """As pip writes it for `[project.scripts]`: with the folder of commands, not the current one, on the path."""
    script = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["zoo"]
    module, _, function = script.partition(":")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "zoo").write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    (tmp_path / "my_mixers.py").write_text("from mixers import GLA\n\n\nclass Mine(GLA):\n    pass\n")
    command = ("bin/zoo", "fit", "--config=gla", "--model.stack.mixer.mixer=my_mixers.Mine", "--print_config")
    done = python(*command, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "my_mixers.Mine" in done.stdout


@pytest.mark.slow
def test_a_namesake_that_our_kernels_hide_is_told_in_one_sentence(tmp_path: Path):
    (tmp_path / "kernels-9.9.dist-info").mkdir()
    (tmp_path / "kernels-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 9.9\n")
    code = "import sys; sys.path.append(sys.argv[1]); import mixers"
    done = python("-c", code, str(tmp_path))
    assert done.returncode == 0
    assert done.stderr.startswith("kernels: Hugging Face's package of this name (9.9) is installed, and hidden by")
    assert len(done.stderr.splitlines()) == 1
