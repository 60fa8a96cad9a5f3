"""The base class of this project's callbacks, and their discovery."""

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import ClassVar

import lightning as L
from lightning.pytorch.callbacks import Callback


class RunCallback(Callback):
    """A callback of every `fit` run. Defining a subclass in a file of this folder is enough to add one without a key.

    Attributes:
        key: The config key of its constructor's arguments, which `zoo/config/keys.py` lists as well; None if it has no
            arguments.
        order: Callbacks are called in ascending order. (Lightning moves those that save checkpoints to the end.)
    """

    key: ClassVar[str | None] = None
    order: ClassVar[int]

    def complete(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle a final validation that was made up for after `fit`, since the run was killed during it."""


@cache
def run_callbacks() -> tuple[type[RunCallback], ...]:
    """The callback classes in the files of this folder, in the order in which they are called."""
    package = __name__.rpartition(".")[0]
    names = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)])]
    modules = [importlib.import_module(f"{package}.{name}") for name in names]
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, RunCallback) and value.__module__ == module.__name__
    }
    return tuple(sorted(classes - {RunCallback}, key=lambda cls: cls.order))
