"""The gated product in Triton, one launch forward and one backward, around PyTorch's matrix products."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import op

BLOCK, WARPS = 2048, 8


@triton.jit
def gated(g, u, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        g = g * tl.sigmoid(g)
    return g * u


@triton.jit(do_not_specialize=["count"])
def multiply(gate, up, h, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + at, gated(g, u, ACTIVATION).to(h.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def differentiate_product(gate, up, dh, h, dgate, dup, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Gradients of gate and up, and the product once more."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dh + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + at, gated(g, u, ACTIVATION).to(h.dtype.element_ty), mask=inside)
    if ACTIVATION == "silu":
        s = tl.sigmoid(g)
        opened, slope = g * s, s * (1 + g * (1 - s))
    else:
        opened, slope = g, 1.0
    tl.store(dup + at, (d * opened).to(dup.dtype.element_ty), mask=inside)
    tl.store(dgate + at, (d * u * slope).to(dgate.dtype.element_ty), mask=inside)


def compute(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> tuple[Tensor]:
    """y [N,O] of gate and up [N,I]."""
    with torch.autocast(gate.device.type, enabled=False):
        h = torch.empty_like(gate)
        with torch.cuda.device_of(gate):
            multiply[(triton.cdiv(gate.numel(), BLOCK),)](
                gate, up, h, gate.numel(), ACTIVATION=activation, BLOCK=BLOCK, num_warps=WARPS
            )
        return (h @ weight.to(gate.dtype).T,)


def fake(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> tuple[Tensor]:
    """The shape of `compute`."""
    return (gate.new_empty(gate.shape[0], weight.shape[0]),)


def differentiate(
    gradients: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    needed: Sequence[bool],
    gate: Tensor,
    up: Tensor,
    weight: Tensor,
    activation: str,
) -> list[Tensor | None]:
    """The gradients of gate, up and the weight."""
    (dy,) = gradients
    assert dy is not None
    with torch.autocast(gate.device.type, enabled=False):
        dh = dy @ weight.to(gate.dtype)
        h, dgate, dup = (torch.empty_like(gate) for _ in range(3))
        with torch.cuda.device_of(gate):
            differentiate_product[(triton.cdiv(gate.numel(), BLOCK),)](
                *(gate, up, dh, h, dgate, dup, gate.numel()), ACTIVATION=activation, BLOCK=BLOCK, num_warps=WARPS
            )
        dweight = (dy.T @ h).to(weight.dtype) if needed[2] else None
        return [dgate, dup, dweight]


gated_linear = op.register("gated_linear", compute, differentiate, fake, results=1)


def forward(gate: Tensor, up: Tensor, weight: Tensor, activation: str) -> Tensor:
    """[…,O]; see `gated_linear`."""
    if torch.is_autocast_enabled(gate.device.type):
        kind = torch.get_autocast_dtype(gate.device.type)
        gate, up = gate.to(kind), up.to(kind)
    size = gate.shape[-1]
    (y,) = gated_linear(gate.reshape(-1, size).contiguous(), up.reshape(-1, size).contiguous(), weight, activation)
    return y.view(*gate.shape[:-1], weight.shape[0])
