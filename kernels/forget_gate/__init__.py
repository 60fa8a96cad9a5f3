"""Decays of gates: log f with f = lb + (1 − lb) σ(x + bias)."""

from torch import Tensor

from ..core.backend import Op
from ..core.recompute import remake
from . import composition

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
    for name, parameter in (("bias", bias), ("odds", odds)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(f"{name}: expected [{x.shape[-1]}], got shape {tuple(parameter.shape)}")
    run = OP.choose(x)
    return remake(run(x, bias, odds, scale), run, x, bias, odds, scale)
