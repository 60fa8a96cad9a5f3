"""The base classes of this project's callbacks, and their discovery."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import nn


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


Forward = Callable[..., Any]


class TrainingForward(Callback):
    """Replaces the forward functions of blocks during training steps, and only then.

    Several of them compose: each wraps the forward functions that the callbacks before it installed. Validation,
    sampling and checkpoints see the original blocks.

    Attributes:
        order: As in `RunCallback`.
    """

    order: ClassVar[int]

    def replaced(self, model: Any) -> Iterable[tuple[nn.Module, Forward]]:
        """Blocks of the language model, each with the function that replaces its `forward`."""
        raise NotImplementedError

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for block, forward in self.replaced(pl_module.model):
            block.forward = forward

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        for block in pl_module.model.layers:
            block.__dict__.pop("forward", None)

    on_exception = on_train_batch_end
