"""The parts of this package that any config may name (`zoo/config/own.py`)."""

import inspect
import sys

from torch import nn

from .base import LinearMixer, TokenMixer
from .expansion import Expansion
from .features import FeatureMap
from .norm import Norm, Output
from .precision import KeepsFp32

ABSTRACT = {Expansion, FeatureMap, KeepsFp32, LinearMixer, Norm, Output, TokenMixer}


def components() -> tuple[type[nn.Module], ...]:
    """Return the public `nn.Module` classes in the modules of this package: mixers, decays, norms, expansions …"""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(f"{__package__}.")]
    return tuple(
        cls
        for module in modules
        for name, cls in vars(module).items()
        if inspect.isclass(cls)
        and issubclass(cls, nn.Module)
        and cls.__module__ == module.__name__
        and cls not in ABSTRACT
        and not name.startswith("_")
    )
