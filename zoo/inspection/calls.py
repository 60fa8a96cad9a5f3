"""The calls that layers make along time, with their arguments, for one text."""

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernels
from mixers import TokenMixer
from zoo.lm.model import LanguageModel

OPS = (kernels.linear_recurrence, kernels.delta_rule, kernels.value_decay_recurrence, kernels.window_attention)


class Call(NamedTuple):
    """A call of one of `OPS`: its arguments by name, and its output [B,T,H,V]."""

    op: Callable[..., Any]
    arguments: Mapping[str, Any]
    output: Tensor


def calls_of_layer(mixer: TokenMixer, x: Tensor, **options: Any) -> list[Call]:
    """Run a layer on x [B,T,hidden], and return the calls of those `OPS` that its class has as attributes."""
    calls: list[Call] = []

    def recorded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        arguments = inspect.signature(op).bind(*args, **kwargs).arguments
        calls.append(Call(op, arguments, result[0] if isinstance(result, tuple) else result))
        return result

    twin = copy.copy(mixer)  # shares its parameters
    for name in dir(type(mixer)):
        op = getattr(type(mixer), name, None)
        if op in OPS:
            vars(twin)[name] = partial(recorded, op)
    with torch.no_grad():
        twin.forward(x, **options)
    return calls


def calls_of_model(model: LanguageModel, tokens: Tensor) -> list[list[Call]]:
    """The calls of each layer's mixer, from the bottom up, for tokens [1,T]."""
    calls: list[list[Call]] = []

    def look(mixer: TokenMixer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        calls.append(calls_of_layer(mixer, args[0], **options))

    with torch.no_grad(), ExitStack() as hooks:
        for mixer in model.mixers:
            hooks.enter_context(mixer.register_forward_pre_hook(look, with_kwargs=True))
        model.last_hidden(tokens)
    return calls
