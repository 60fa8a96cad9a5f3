"""Decays of gates: log f with f = lb + (1 − lb) σ(x), and the input gates 1 − f that are tied to them."""

import torch
from torch import Tensor

from ..backend import choose
from ..recompute import remake
from . import composition, reference

IMPLEMENTATIONS = {"torch": composition.forward, "reference": reference.forward}


def forget_gate(x: Tensor, bias: Tensor | None = None, odds: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """log_decay = scale · log(σ(o) + σ(−o) σ(x + bias)), in at least fp32.

    Inside `recomputing()` the result is not saved by what follows. An expansion makes it the largest tensor of a layer,
    and x, from which it is made, has half of its size or is not kept either.

    Args:
        x: Raw gates […,C].
        bias: Added to x [C]; None for none.
        odds: Log odds o of the lower bounds lb = σ(o) [C]; None for lb = 0.
        scale: Factor on the result.

    Returns:
        log_decay, in the shape of x.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    for name, given in (("bias", bias), ("odds", odds)):
        if given is not None and given.shape != x.shape[-1:]:
            raise ValueError(f"{name}: expected [{x.shape[-1]}], got shape {tuple(given.shape)}")
    run = choose("forget_gate", IMPLEMENTATIONS, x)
    return remake(run(x, bias, odds, scale), run, x, bias, odds, scale)


def complement(log_decay: Tensor, dtype: torch.dtype) -> Tensor:
    """1 − exp(log_decay): how much a channel may write that forgets so much.

    Inside `recomputing()` the result is not saved by what follows.

    Args:
        log_decay: Of any shape, ≤ 0.
        dtype: Dtype of the result.

    Returns:
        The input gates, in the shape of `log_decay`.
    """
    return remake(composition.complement(log_decay, dtype), composition.complement, log_decay, dtype)
