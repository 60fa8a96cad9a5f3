"""Comparison of the computations of two models on the meta device."""

import dataclasses
from typing import Any

from torch import nn

from zoo.saved.public.family import words

# attributes that only matter to a model that is not trained yet; a Features' map is a module, which is compared itself
_INITIAL = words("training initializer_range linear_initializer scale_output_projections low high site map")
_PLAIN = (bool, int, float, str, type(None))


def difference(ours: nn.Module, other: nn.Module) -> str | None:
    """The first difference in modules, settings or shapes, as `layers.0.mixer.o_norm.eps is 0.001 instead of 1e-06`.

    Differences that only matter for initialisation do not count.
    """
    theirs = dict(other.named_modules(remove_duplicate=False))
    for name, module in ours.named_modules(remove_duplicate=False):
        where, counterpart = f"{name}: " if name else "", theirs.pop(name, None)
        if counterpart is None or type(counterpart) is not type(module):
            instead = "nothing" if counterpart is None else type(counterpart).__name__
            return f"{where}{type(module).__name__} instead of {instead}"
        settings, expected = _settings(module), _settings(counterpart)
        for key in [*settings, *expected]:
            if settings.get(key) != expected.get(key):
                return f"{f'{name}.{key}'.lstrip('.')} is {settings.get(key)} instead of {expected.get(key)}"
    return f"nothing instead of {next(iter(theirs))}" if theirs else None


def _settings(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module, and the shapes of its parameters."""
    shapes = {name: list(tensor.shape) for name, tensor in module.named_parameters(recurse=False)}
    return {**_plain(vars(module)), **shapes}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in values.items():
        if key.startswith("_") or key in _INITIAL:
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            plain |= {f"{key}.{name}": part for name, part in _plain(fields).items()}
        elif isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(v, _PLAIN) for v in value)):
            plain[key] = value
    return plain
