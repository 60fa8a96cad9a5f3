"""Names for mixers: a decorator, look-up by name or dotted path, and plug-ins from other distributions."""

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, TypeVar

from kernels import UserError

from .base import TokenMixer

ENTRY_POINTS = "token_mixer_zoo.mixers"


@dataclass(frozen=True)
class Entry:
    """A registered mixer: its class, and what tables and tests need to know about it."""

    mixer: type[TokenMixer]
    recurrence: str
    paper: str
    tiny: Mapping[str, Any] = field(default_factory=dict)  # arguments for a meaningful test at a tiny size


M = TypeVar("M", bound=TokenMixer)
_entries: dict[str, Entry] = {}


def register(*, recurrence: str, paper: str, tiny: Mapping[str, Any] | None = None) -> Callable[[type[M]], type[M]]:
    """Class decorator: list a mixer under its class name. Every registered mixer is tested by `check_mixer`.

    Args:
        recurrence: The recurrence in one line.
        paper: Where it was published.
        tiny: Constructor arguments for a meaningful test at hidden size 64.

    Raises:
        UserError: The name belongs to another class.
    """

    def add(mixer: type[M]) -> type[M]:
        previous = _entries.get(mixer.__name__)
        if previous is not None and previous.mixer.__module__ != mixer.__module__:
            raise UserError(f"mixer: the name {mixer.__name__!r} is taken by {previous.mixer.__module__}")
        _entries[mixer.__name__] = Entry(mixer, recurrence, paper, tiny or {})
        return mixer

    return add


def import_mixers(package: str, path: Iterable[str]) -> dict[str, type[TokenMixer]]:
    """Import every module of a package, which registers its mixers; subpackages are left out.

    Args:
        package: Name of the package.
        path: Its `__path__`.

    Returns:
        The mixers that the package registers, by name.

    Raises:
        ImportError: A file is not valid Python, or the name of its mixer is taken.
    """
    for module in pkgutil.iter_modules(path, f"{package}."):
        try:
            if not module.ispkg:
                importlib.import_module(module.name)
        except SyntaxError as error:
            raise ImportError(f"{error.filename}, line {error.lineno}: {error.msg}") from None
        except UserError as error:
            raise ImportError(f"{module.name}: {str(error).removeprefix('mixer: ')}") from None
    return {name: each.mixer for name, each in _entries.items() if each.mixer.__module__.startswith(f"{package}.")}


@cache
def _load_plugins() -> None:
    """Import the modules behind the entry points, once; importing them registers their mixers."""
    for point in entry_points(group=ENTRY_POINTS):
        point.load()


def names() -> list[str]:
    """The names of all registered mixers, plug-ins included, in alphabetical order."""
    _load_plugins()
    return sorted(_entries)


def entry(name: str) -> Entry:
    """The entry of a registered mixer.

    Raises:
        UserError: No mixer has this name.
    """
    if name not in names():
        raise UserError(f"mixer: {name!r} is not registered{did_you_mean(name, names())} (known: {', '.join(names())})")
    return _entries[name]


def get(name: str) -> type[TokenMixer]:
    """The mixer class of a registered name, or of a dotted path such as ``package.module.Class``.

    Raises:
        UserError: No mixer has this name, or this path holds no mixer.
    """
    module, _, attribute = name.rpartition(".")
    if not module:
        return entry(name).mixer
    try:
        mixer = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        raise UserError(f"mixer: {name!r} cannot be imported: {error}") from None
    if not (isinstance(mixer, type) and issubclass(mixer, TokenMixer)):
        raise UserError(f"mixer: {name!r} is not a TokenMixer class")
    return mixer


def similar(name: str, candidates: Iterable[str], cutoff: float = 0.65) -> list[str]:
    """The candidates that are most similar to a name, or all that start with it; empty if none is close.

    Args:
        name: A name that is not one of the candidates.
        candidates: The names that exist.
        cutoff: The least similarity that counts, from 0 to 1.
    """
    ratios = {other: difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio() for other in candidates}
    best = max(ratios.values(), default=0.0)
    longer = [other for other in ratios if len(name) > 2 and other.lower().startswith(name.lower())]
    return [other for other, ratio in ratios.items() if ratio == best] if best >= cutoff else longer


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """'; did you mean …?' if at most three of the candidates are the most similar, otherwise an empty string."""
    close = similar(name, candidates)
    return f"; did you mean {' or '.join(map(repr, close))}?" if 0 < len(close) <= 3 else ""
