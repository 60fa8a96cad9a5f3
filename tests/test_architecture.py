"""Rules of the house that no other test would notice."""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kernels
import mixers

ROOT = Path(__file__).parents[1]
PACKAGES = ("kernels", "mixers", "zoo")
FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))] + [ROOT / "cli.py"]
TREES = {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text()) for file in FILES}
OUTSIDE = {"transformers", "fla", "lm_eval"}
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
    "zoo.lm",
    "zoo.data",
    "zoo.generation",
    "zoo.checkpoints",
    "zoo.train",
    "zoo.train.callbacks",
    "zoo.config",
    "zoo.conversion",
    "zoo.loading",
    "zoo.statex",
    "zoo.runs",
    "zoo.sweeps",
    "zoo.benchmarks",
    "zoo.evaluation",
    "zoo.scaling",
    "zoo.doctor",
    "zoo.report",
    "zoo.reproductions",
)


def imports(name: str) -> Iterator[str]:
    """Dotted names that a file imports, `from a import b` as both a and a.b; relative ones made absolute."""
    package = name.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(TREES[name]):
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


@pytest.mark.parametrize("name", TREES)
def test_imports_point_one_way(name: str):
    package = name.partition("/")[0]
    allowed = name.startswith(("zoo/evaluation", "zoo/benchmarks/peers"))
    bad = FORBIDDEN[package] | (set() if allowed else OUTSIDE)
    found = {imported for imported in imports(name) for other in bad if within(imported, other)}
    assert not found, f"{name} imports {found}"


def room(module: str) -> str | None:
    """The innermost room that a dotted name is in."""
    return max((room for room in ROOMS if within(module, room)), key=len, default=None)


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("zoo/") and name != "zoo/__init__.py"])
def test_no_import_runs_back_up_between_rooms(name: str):
    own = room(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    assert own is not None, f"{name} stands in no room; tests/test_architecture.py lists them in their order"
    used = {other for imported in imports(name) if (other := room(imported)) is not None}
    above = {other for other in used if ROOMS.index(other) > ROOMS.index(own)}
    assert not above, f"{name} imports from {above}, which come after {own}"


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("kernels/")])
def test_kernels_know_no_module(name: str):
    assert not [imported for imported in imports(name) if imported in ("torch.nn", "torch.nn.Module")]
    assert not [n for n in ast.walk(TREES[name]) if isinstance(n, ast.ClassDef) and "Module" in ast.dump(n)]


@pytest.mark.parametrize("name", TREES)
def test_names_say_what_is_inside(name: str):
    assert Path(name).stem not in {
        "utils",
        "util",
        "helpers",
        "helper",
        "common",
        "misc",
        "tools",
        "core",
        "base_utils",
    }


@pytest.mark.parametrize("name", TREES)
def test_no_print(name: str):
    calls = [n for n in ast.walk(TREES[name]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    assert not [call.lineno for call in calls if call.func.id in ("print", "breakpoint")]


# a family of public checkpoints is a declaration of what their layers are called here; hybrids share a part of theirs
DECLARATIONS = ("zoo/conversion/families/", "zoo/conversion/hybrid.py", "zoo/conversion/fla_attention.py")


@pytest.mark.parametrize("name", [n for n in TREES if not n.startswith(("kernels/", "mixers/", *DECLARATIONS))])
def test_no_mixer_is_named_above_the_mixers(name: str):
    """What only one mixer needs goes through a hook that all mixers have."""
    code = ast.parse(ast.unparse(TREES[name]))
    for node in ast.walk(code):  # docstrings may tell of them
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    words = set(re.findall(r"\w+", ast.unparse(code)))
    # the help text shows how to ask for one by name
    assert not words & ({*mixers.names()} - ({"GatedDeltaNet"} if name == "cli.py" else set()))


@pytest.mark.parametrize("name", [name for name in TREES if name.startswith("mixers/")])
def test_mixers_take_no_arbitrary_arguments(name: str):
    """A typo in a config must not vanish in **kwargs."""
    functions = [n for n in ast.walk(TREES[name]) if isinstance(n, ast.FunctionDef)]
    constructors = [f for f in functions if f.name in ("__init__", "__new__")]
    assert not [f.lineno for f in constructors if f.args.kwarg or f.args.vararg]


def public(module) -> Iterator[object]:
    """Public functions and classes that are defined in a module."""
    for name, thing in vars(module).items():
        defined = (inspect.isclass(thing) or inspect.isfunction(thing)) and thing.__module__ == module.__name__
        if defined and not name.startswith("_"):
            yield thing


def modules(package) -> Iterator:
    yield package
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        yield importlib.import_module(found.name)


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


def run(code: str, **environment: str) -> str:
    """Run code in a fresh process from the repository root; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


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


def test_a_namesake_that_hides_our_kernels_is_told_in_one_sentence(tmp_path: Path):
    """Hugging Face's package `kernels`, found first as in an editable installation."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("")
    (tmp_path / "start.py").write_text("import sys, cli; cli.main()")
    done = subprocess.run(
        [sys.executable, "start.py", "mixers"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr == (
        f"error: kernels: {tmp_path}/kernels/__init__.py is another package of this name, such as Hugging Face's; run "
        f"`pip uninstall kernels`, or put this project before it: PYTHONPATH={ROOT}\n"
    )


@pytest.mark.slow
def test_a_namesake_that_our_kernels_hide_is_told_in_one_sentence(tmp_path: Path):
    (tmp_path / "kernels-9.9.dist-info").mkdir()
    (tmp_path / "kernels-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 9.9\n")
    code = "import sys; sys.path.append(sys.argv[1]); import mixers"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert done.stderr.startswith("kernels: Hugging Face's package of this name (9.9) is installed, and hidden by")
    assert len(done.stderr.splitlines()) == 1
