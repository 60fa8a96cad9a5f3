"""The components that any config may name: this project's, and PyTorch's optimisers and schedules.

Whether a foreign config is built does not depend on which modules happen to be imported: they are listed here, and
`import mixers` imports all of its modules.
"""

from collections.abc import Iterable
from functools import cache
from types import ModuleType

import torch

import mixers
import zoo.lm
from mixers.components import components
from zoo.train.muon import Muon

STACKS = (zoo.lm.H1, zoo.lm.H2, zoo.lm.Pattern, zoo.lm.Uniform)
MLPS = (zoo.lm.ChannelMixer, zoo.lm.GLU, zoo.lm.MLPLayer, zoo.lm.RWKV7ChannelMix, zoo.lm.SquaredReLU, zoo.lm.SwiGLU)
ENDS = (zoo.lm.Inputs, zoo.lm.Patches, zoo.lm.Classifier)
OF_MODELS: tuple[type, ...] = (*STACKS, *MLPS, *ENDS, mixers.Expanded, *components(), Muon)
_PUBLIC = (mixers, zoo.lm, torch.optim, torch.optim.lr_scheduler)  # packages that export classes of modules


@cache
def of_data() -> tuple[type, ...]:
    """Return the data modules and tasks. Importing them imports Lightning, which takes longer than PyTorch."""
    from zoo import data

    modules = (data.Images, data.MarkovChain, data.MixedText, data.MQAR, data.TextData, data.TokenTasks)
    return *modules, data.Digits, data.WordProblem


def own_component(name: str) -> type | None:
    """The component of this name, with or without its module; None if it is not one of the table."""
    return _of_models().get(name) or _of_data().get(name)


def registered(cls: type) -> bool:
    """Return whether a class was registered by `mixers.register`, also by an installed plug-in."""
    return any(mixers.entry(name).mixer is cls for name in mixers.names())


@cache
def _of_models() -> dict[str, type]:
    return _by_name((*_of_torch(), *OF_MODELS), _PUBLIC)


@cache
def _of_data() -> dict[str, type]:
    from zoo import data

    return _by_name(of_data(), (data,))


def _by_name(classes: Iterable[type], packages: Iterable[ModuleType]) -> dict[str, type]:
    table: dict[str, type] = {}
    for cls in classes:  # where two share a name, this project's class takes it
        exported = [package.__name__ for package in packages if getattr(package, cls.__name__, None) is cls]
        table |= {f"{module}.{cls.__name__}": cls for module in (cls.__module__, *exported)}
        table[cls.__name__] = cls
    return table


def _of_torch() -> list[type]:
    """PyTorch's optimisers and schedules, which only compute."""
    kinds = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    public = [(module, name) for module in (torch.optim, torch.optim.lr_scheduler) for name in module.__all__]
    classes = [getattr(module, name) for module, name in public]
    return [cls for cls in classes if isinstance(cls, type) and issubclass(cls, kinds)]
