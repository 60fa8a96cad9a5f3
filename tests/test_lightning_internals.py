"""Lightning's private names are used in one file, so that an upgrade of Lightning is a change to one file."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

import lightning
import pytest

from zoo.train.trainer import install

ROOT = Path(__file__).parents[1]
ALLOWED = "zoo/train/lightning_internals.py"
FILES = [file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "zoo").rglob("*.py"))]
# parts of a trainer, whose names variables have
PARTS = {"trainer", "strategy", "loop", "fit_loop", "epoch_loop", "val_loop", "connector", "launcher", "accelerator"}
PARTS |= {
    "plugin",
    "precision_plugin",
    "profiler",
    "logger",
    "datamodule",
    "pl_module",
    "callback",
    "optimizer",
    "thread",
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_imports(tree: ast.AST) -> set[str]:
    """Private names and modules that are imported from Lightning."""
    actual = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        actual |= {n for n in names if n.split(".")[0] == "lightning" and any(map(is_private, n.split(".")))}
    return actual


def private_of_parts(tree: ast.AST) -> set[str]:
    """Private attributes of the parts of a trainer: `trainer._results`, `loop._should_check_val_epoch()`."""
    actual = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("getattr", "setattr", "hasattr"):
            owner, name = node.args[0], getattr(node.args[1], "value", None)
        else:
            continue
        part = ast.unparse(owner).rpartition(".")[2]
        if part in PARTS and isinstance(name, str) and is_private(name):
            actual.add(f"{part}.{name}")
    return actual


def private_of_self(tree: ast.AST) -> set[str]:
    """Private attributes and methods that a class defines or uses, of `self` or `super()`."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).startswith(("self", "cls", "super(")):
            names.add(node.attr)
    return set(filter(is_private, names))


@cache
def names_of(cls: type) -> set[str]:
    return private_of_self(ast.parse(textwrap.dedent(inspect.getsource(cls))))


def shared_with_lightning(module: ModuleType) -> set[str]:
    """Private names of classes of a module that a base class of Lightning has, too."""
    actual = set()
    for cls in vars(module).values():
        if inspect.isclass(cls) and cls.__module__ == module.__name__:
            bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] == lightning.__name__]
            actual |= {f"{cls.__name__}.{name}" for base in bases for name in names_of(cls) & names_of(base)}
    return actual


def uses(tree: ast.AST) -> Iterable[str]:
    return sorted(private_imports(tree) | private_of_parts(tree))


@pytest.mark.parametrize("file", FILES)
def test_no_private_name_of_lightning_is_used(file: str):
    if file != ALLOWED:
        assert not uses(ast.parse((ROOT / file).read_text()))


@pytest.mark.slow
def test_no_class_shares_a_private_name_with_a_base_class_of_lightning():
    """Neither to use it, nor by accident."""
    deriving = [f for f in FILES if f.startswith("zoo/") and f != ALLOWED and "lightning" in (ROOT / f).read_text()]
    names = [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in deriving]
    shared = {name: actual for name in names if (actual := shared_with_lightning(importlib.import_module(name)))}
    assert not shared
    assert shared_with_lightning(importlib.import_module("zoo.train.lightning_internals"))  # the search finds some


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from lightning.pytorch.loops import _FitLoop", ["lightning.pytorch.loops._FitLoop"]),
        ("import lightning.pytorch._graveyard", ["lightning.pytorch._graveyard"]),
        ("trainer.fit_loop.epoch_loop._batches_that_stepped = 1", ["epoch_loop._batches_that_stepped"]),
        ("self.trainer._results", ["trainer._results"]),
        ("getattr(self.trainer, '_results', None)", ["trainer._results"]),
        ("self._results; trainer.__class__; from torch import _dynamo", []),
        ("class A:\n    def _f(self): strategy.save()", []),
    ],
)
def test_the_search_finds_private_names(code: str, names: list[str]):
    assert uses(ast.parse(code)) == names


def test_processes_do_not_wait_for_each_other_before_each_batch(monkeypatch: pytest.MonkeyPatch):
    trainer = lightning.Trainer(max_steps=7, min_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False)
    attached = vars(trainer.fit_loop.epoch_loop).copy()
    install(trainer)
    loop, sent = trainer.fit_loop.epoch_loop, list[object]()
    monkeypatch.setattr("torch.distributed.broadcast", lambda *tensors, **_: sent.extend(tensors))
    loop._broadcast_sigterm_tensor()
    assert not sent
    assert vars(loop) == attached
