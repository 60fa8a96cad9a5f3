"""Decays of gates: log f with f = lb + (1 − lb) σ(x + bias), and input gates 1 − f."""

import torch
from torch import Tensor

from ..core.autograd import plain
from ..core.backend import Op, loaded
from ..core.deterministic import is_deterministic
from ..core.recompute import remake
from ..core.recurrence import at_least_fp32
from . import composition
from .input_gate import complement

OP = Op(
    "forget_gate", reference=composition.reference, torch=composition.forward, gpu="kernels.forget_gate.gpu.op:forward"
)


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
    _check(x, bias=bias, odds=odds)
    run = OP.choose(x)
    return remake(run(x, bias, odds, scale), run, x, bias, odds, scale)


def tied_gates(
    x: Tensor, bias: Tensor | None = None, odds: Tensor | None = None, *, scale: float = 1.0, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return log_decay of `forget_gate` and the input gate tied to it, 1 − exp(log_decay).

    The input gates are accurate where little is forgotten. Inside `recomputing()`, later operations save neither of
    them; the backward pass computes both again.

    Args:
        x, bias, odds, scale: As for `forget_gate`.
        dtype: Dtype of the input gates.

    Returns:
        log_decay and the input gates, in the shape of x.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    _check(x, bias=bias, odds=odds)
    if OP.backend(x) == "triton":
        both: tuple[Tensor, Tensor] = loaded("kernels.forget_gate.gpu.op:tied")(x, bias, odds, scale, dtype)
        return both
    log_decay = forget_gate(x, bias, odds, scale=scale)
    return log_decay, complement(log_decay, dtype)


def lower_bound_odds(bounds: Tensor, layer: int) -> Tensor:
    """Log odds of the lower bound of each channel at a layer: Σ_{1 ≤ i ≤ layer} softmax(bounds)_i (arXiv 2404.07904).

    Args:
        bounds: Rows of all layers [L,C].
        layer: The layer, from 1; at 0 the bound is 0, whose log odds are not finite.

    Returns:
        Log odds [C] in at least fp32.
    """
    differentiated = bounds.requires_grad and torch.is_grad_enabled()
    if not differentiated and plain((bounds,)) and not is_deterministic() and OP.backend(bounds) == "triton":
        odds: Tensor = loaded("kernels.forget_gate.gpu.op:odds_at")(bounds, layer)
        return odds
    rows = at_least_fp32(bounds)
    return rows[1 : layer + 1].logsumexp(0) - torch.cat([rows[:1], rows[layer + 1 :]]).logsumexp(0)


def _check(x: Tensor, **parameters: Tensor | None) -> None:
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(f"{name}: expected [{x.shape[-1]}], got shape {tuple(parameter.shape)}")
