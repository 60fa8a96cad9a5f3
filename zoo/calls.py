"""Checks of the arguments of the functions of `zoo`, so that a mistake in Python is a `UserError` of one sentence."""

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar, get_args, get_origin

import numpy as np
import torch

from kernels import UserError
from zoo.arguments import check_not_empty
from zoo.config.keys import KEYS
from zoo.config.signatures import settable
from zoo.config.suggest import suggestions
from zoo.lm.model import LanguageModel

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to refuse arguments that it does not have, and things that are no configs or paths."""
    signature = inspect.signature(function)
    parameters = signature.parameters
    kinds = {parameter.kind: name for name, parameter in parameters.items()}
    configs = kinds.get(inspect.Parameter.VAR_POSITIONAL, "")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            for name, value in kwargs.items():
                if name not in parameters:
                    raise UserError(_not_an_argument(function.__name__, parameters, name, value))
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise UserError(f"{function.__name__}: {error} ({', '.join(parameters)})") from None
        items = bound.pop(configs, ())
        for item in items:
            if isinstance(item, list | tuple):
                sentence = f"{function.__name__} takes configs as separate arguments, as in"
                raise UserError(f"config: {sentence} zoo.{function.__name__}(*configs)")
            if not isinstance(item, str | os.PathLike | Mapping):
                raise UserError(f"config: {_short(item)} is not a name, a path, an override or a mapping")
        _check_paths(function.__name__, parameters, bound)
        plain = [_plain(item, "config") if isinstance(item, Mapping) else item for item in items]
        return function(*args[: len(args) - len(items)], *plain, **kwargs)  # type: ignore[arg-type]

    return call


def _not_an_argument(function: str, parameters: Iterable[str], name: str, value: object) -> str:
    """The sentence for a keyword that is not an argument; it shows the override where there is just one such key."""
    start = f"{name}: not an argument of zoo.{function}"
    allowed = ", ".join(parameter for parameter in parameters if parameter != "configs_and_overrides")
    if "configs_and_overrides" not in parameters:
        return f"{start} (allowed: {allowed})"
    if name in ("config", "configs"):
        return f'{start}; pass configs without a name, as in zoo.{function}("gla.yaml")'
    if name in KEYS and isinstance(value, Mapping):
        return f'{start}; pass the mapping {{"{name}": …}}'
    if len(places := [name] if name in KEYS else _places(name)) == 1:
        text = value if isinstance(value, str) else json.dumps(value, default=lambda _: "…")
        return f'{start}; pass the override "{places[0]}={text}" after the config'
    example = 'overrides such as "trainer.max_steps=300"'
    return f"{start} (allowed: {allowed}); keys of a config are {example}, or mappings"


def _places(name: str) -> list[str]:
    """The keys of a config that are meant by `name`, as far as they do not depend on the classes that it names."""
    from zoo.config.classes import CLASSES  # imports Lightning
    from zoo.data import TextData

    return suggestions(name, "", [f"{key}.{each}" for key, cls in {**CLASSES, "data": TextData}.items()
                                  for each in settable(cls)] + [*KEYS])  # fmt: skip


def _plain(value: object, key: str) -> object:
    """A config whose values YAML can hold: numbers of NumPy and PyTorch, paths and classes are converted."""
    if isinstance(value, Mapping):
        return {name: _plain(each, f"{name}" if key == "config" else f"{key}.{name}") for name, each in value.items()}
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each, key) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    raise UserError(f"{key}: {value!r} cannot be part of a config, which holds numbers, text, lists and classes")


def _short(value: object) -> str:
    """A value in a sentence: a number or None in full, anything else by its class."""
    return repr(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"


def _check_paths(function: str, parameters: Mapping[str, inspect.Parameter], bound: Mapping[str, object]) -> None:
    for name, value in bound.items():
        types = get_args(parameters[name].annotation)
        allowed = [list if get_origin(each) is list else each for each in types]
        if Path not in allowed:
            continue
        for path in value if isinstance(value, list | tuple) else [value]:
            check_not_empty(name, path)
        if isinstance(value, (*allowed, os.PathLike)):
            continue
        if not isinstance(value, LanguageModel):
            raise UserError(f"{name}: {_short(value)} is not a path")
        if function not in ("generate", "inspect"):  # the only ones that take a model in memory
            raise UserError(f"{name}: {function} reads a saved model; name its run, checkpoint or folder")
