"""Numbers that make no sense end in one sentence: those of the model, and of everything around its mixers."""

import importlib
import pkgutil
from functools import partial
from typing import Any

import pytest
from torch import nn

import mixers
import zoo.lm
from zoo.lm.block import Block, PostNormBlock
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Stack, Uniform

from ...constructors import named, refuses, wrong

MODULES = [importlib.import_module(f"zoo.lm.{module.name}") for module in pkgutil.iter_modules(zoo.lm.__path__)]
MADE = sorted(
    {
        each
        for module in MODULES
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__ == module.__name__ and issubclass(each, nn.Module | Stack)
    }
    - {Block, PostNormBlock},  # the model makes them, of numbers that it has checked
    key=lambda each: each.__name__,
)
GIVEN: dict[str, Any] = {
    "stack": Uniform(partial(mixers.RetNet, head_dim=8)),
    "hidden_size": 16,
    "vocab_size": 11,
    "site": mixers.Site(hidden_size=16, num_heads=2),
}


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "name", "value"), [*wrong(MADE, {})], ids=named)
def test_wrong_numbers(cls: type, name: str, value: Any):
    refuses(cls, name, value, GIVEN, also=("vocab_size",))


def test_the_model_is_among_them():
    cases = {(cls, name) for cls, name, _ in wrong(MADE, {})}
    sizes = ("vocab_size", "hidden_size", "num_heads", "num_layers", "intermediate_size", "norm_eps", "nominal_size")
    assert {(LanguageModel, name) for name in sizes} <= cases
