import importlib
import inspect
import json
import pkgutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import lightning as L
import pytest
import torch

import mixers
import zoo
from kernels import UserError
from zoo.config.classes import CLASSES, COMPONENTS
from zoo.config.own import own_component
from zoo.config.signatures import component, hints, subclasses
from zoo.saved.trust import vet_model

from ...forked_python import forked_python


def modules(package: ModuleType) -> Iterator[ModuleType]:
    for actual in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not actual.name.endswith("__main__"):
            yield importlib.import_module(actual.name)


def parts_of(hint: Any) -> Iterator[Any]:
    yield hint
    for part in get_args(hint):
        yield from parts_of(part)


def bases_of(cls: type) -> set[type]:
    actual = {component(part) for hint in hints(cls).values() for part in parts_of(hint) if not isinstance(part, list)}
    return {base for base in actual if base is not None and not getattr(base, "_is_protocol", False)}


ABSTRACT = {"Associative", "Expansion", "FeatureMap", "LinearMixer", "Norm", "Output", "ResumableData"}
ABSTRACT |= {"Site", "Stack", "TokenisedText", "TokenMixer", "TokenTask"}
MADE = {"AdamW"}  # takes the place of PyTorch's on a GPU; no config names it


def missing() -> dict[str, str]:
    """Classes that constructors take, and configs can name therefore, but the table lacks → the class that is taken."""
    own = {value for package in (mixers, zoo) for module in modules(package) for value in vars(module).values()
           if isinstance(value, type) and value.__module__.startswith(("mixers.", "zoo."))}  # fmt: skip
    bases: set[type] = {L.LightningDataModule}
    waiting = [cls for cls in CLASSES.values() if cls is not L.Trainer]
    seen: set[type] = set()
    while waiting:
        cls = waiting.pop()
        if cls not in seen:
            seen.add(cls)
            bases |= bases_of(cls) - {torch.utils.data.Dataset, torch.nn.Module}  # of users
            waiting += [other for base in bases for other in subclasses(base) | {base} if other in own]
    fitting = {cls: base for cls in own for base in bases if issubclass(cls, base) and not inspect.isabstract(cls)}
    return {
        cls.__name__: base.__name__ for cls, base in fitting.items() if cls not in COMPONENTS and cls.__name__[0] != "_"
    }


@pytest.mark.slow
def test_the_table_has_every_component(tmp_path: Path):
    # in a new process: the components must not be those that tests have defined or changed
    program = tmp_path / "program.py"
    program.write_text("import json; from tests.zoo.config.test_own import missing; print(json.dumps(missing()))")
    done = subprocess.run([forked_python(), str(program)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    actual = json.loads(done.stdout.splitlines()[-1])
    assert actual.keys() <= ABSTRACT | MADE, actual


def test_names_are_those_of_one_class():
    assert len({cls.__name__ for cls in COMPONENTS}) == len(COMPONENTS)
    for cls in COMPONENTS:
        assert own_component(cls.__name__) is cls
        assert own_component(f"{cls.__module__}.{cls.__qualname__}") is cls


def test_exported_names():
    assert own_component("mixers.GLA") is mixers.GLA
    assert own_component("zoo.data.TextData") is zoo.data.TextData
    assert own_component("torch.optim.SGD") is torch.optim.SGD
    assert own_component("torch.optim.lr_scheduler.OneCycleLR") is torch.optim.lr_scheduler.OneCycleLR
    for name in ("mixers.gla.mixers.GLA", "os.system", "zoo.experiments.runner.Runner", "mixers.TokenMixer", ""):
        assert own_component(name) is None


def test_an_import_is_no_consent():
    class Imported(mixers.GLA):
        """A mixer that is in memory, which nobody registered."""

    stack = {"class_path": "zoo.lm.Uniform", "init_args": {"mixer": f"{__name__}.{Imported.__name__}"}}
    globals()["Imported"] = Imported
    for name in (f"{__name__}.Imported", "Imported"):
        stack["init_args"] = {"mixer": name}
        with pytest.raises(UserError, match=r"was not written by you, and its model\.stack\.mixer names"):
            vet_model({"stack": stack}, "theirs")
    del globals()["Imported"]
    stack["init_args"] = {"mixer": "mixers.GLA", "pattern": "M*-"}  # letters of layers name no class
    vet_model({"stack": stack}, "theirs")


@pytest.mark.parametrize(
    "name", ["os.system", "cProfile.run", "mixers.gla.mixers.GLA", "{class_path: os.system}", "a b"]
)
@pytest.mark.parametrize("place", ["position", "unknown"])
def test_text_that_may_name_code_is_refused_wherever_it_is(place: str, name: str):
    for value in (name, [name], {"x": [name]}, {"class_path": name}):
        with pytest.raises(UserError, match=rf"its model\.{place}(\.x)? names"):
            vet_model({"stack": "Uniform", place: value}, "theirs")
