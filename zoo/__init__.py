"""Language models with pluggable token mixers: built from configs, trained with Lightning."""

from importlib import import_module
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from mixers import UserError  # which makes sure that `kernels` is this project's
from zoo.calls import checked
from zoo.config import build
from zoo.lm import LanguageModel, join_states, load_state, save_state, take_states
from zoo.runs.fit import Result, fit, predict, test, validate

if TYPE_CHECKING:
    from zoo import scaling as scaling
    from zoo.evaluation import evaluate
    from zoo.experiments import compare, sweep
    from zoo.experiments.linearise import linearise
    from zoo.inspection import inspect
    from zoo.performance.command import bench
    from zoo.performance.doctor import doctor
    from zoo.runs.generate import generate
    from zoo.saved.convert import convert
    from zoo.saved.export import export
    from zoo.saved.grow import statex
    from zoo.saved.model import load, load_tokenizer

__version__ = "0.1.0"

build, fit, validate = checked(build), checked(fit), checked(validate)
test, predict = checked(test), checked(predict)

# module → names that are imported from it when they are first used, since these modules import Lightning, which takes
# three times as long as PyTorch
_LAZY = {
    "evaluation": "evaluate",
    "experiments": "compare sweep",
    "experiments.linearise": "linearise",
    "inspection": "inspect",
    "performance.command": "bench",
    "performance.doctor": "doctor",
    "runs.generate": "generate",
    "saved.convert": "convert",
    "saved.export": "export",
    "saved.grow": "statex",
    "saved.model": "load load_tokenizer",
}
_MODULES = {name: module for module, names in _LAZY.items() for name in names.split()}

__all__ = [
    "LanguageModel",
    "Result",
    "UserError",
    "bench",
    "build",
    "compare",
    "convert",
    "doctor",
    "evaluate",
    "export",
    "fit",
    "generate",
    "inspect",
    "join_states",
    "linearise",
    "load",
    "load_state",
    "load_tokenizer",
    "predict",
    "save_state",
    "statex",
    "sweep",
    "take_states",
    "test",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name == "scaling":
        return import_module("zoo.scaling")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value = checked(value) if isfunction(value) else value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
