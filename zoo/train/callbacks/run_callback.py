"""What a callback of this project declares, so that nothing else has to know of it."""

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import ClassVar

from lightning.pytorch.callbacks import Callback


class RunCallback(Callback):
    """A callback that every run of `fit` has. A file of this folder with such a class is all that one needs.

    Attributes:
        key: The config key under which its constructor's arguments stand; None if it takes no arguments.
        order: Callbacks hear of an event in ascending order. (Lightning moves those that save checkpoints to the end.)
    """

    key: ClassVar[str | None] = None
    order: ClassVar[int]


@cache
def run_callbacks() -> tuple[type[RunCallback], ...]:
    """The callbacks in the files of this folder, in the order in which they hear of events."""
    package = __name__.rpartition(".")[0]
    names = [found.name for found in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = [importlib.import_module(f"{package}.{name}") for name in names]
    classes = {
        thing
        for module in modules
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, RunCallback) and thing.__module__ == module.__name__
    }
    return tuple(sorted(classes - {RunCallback}, key=lambda cls: cls.order))
