"""The readout of Mamba-2 and Mamba-3: skip connection, and of the latter a token's own write and the output gate."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.backend import Op
from ..core.deterministic import is_deterministic
from ..core.elementwise import silu
from ..core.recompute import remake
from ..core.recurrence import at_least_fp32

LARGEST = 4096  # the kernels hold whole heads in registers


def own_shares(q: Tensor, k: Tensor, beta: Tensor, *, q_bias: Tensor, k_bias: Tensor, D: Tensor) -> Tensor:
    """Σ β (q + q_bias)·(k + k_bias) + D over the E subheads of a head: how much of its value a token reads.

    Args:
        q: Queries [B,T,G·E,K], before a rotation; the H/G heads of a group share them.
        k: Keys [B,T,G·E,K], before the same rotation.
        beta: Input gates of the token's own write [B,T,H·E].
        q_bias: Bias of the queries of each subhead of each head [H·E,K].
        k_bias: Bias of the keys [H·E,K].
        D: Weight of the skip connection [H].

    Returns:
        Shares [B,T,H] in at least fp32.
    """
    E = len(q_bias) // len(D)
    q, k = (at_least_fp32(x).unflatten(2, (-1, E)) for x in (q, k))
    of_q, of_k = (x.unflatten(0, (q.shape[2], -1, E)) for x in (q_bias, k_bias))
    with without_autocast(q.device):  # no queries and keys of all heads
        crossed = _products(q, of_k) + _products(k, of_q)
    scores = crossed + (q * k).sum(-1)[:, :, :, None] + (of_q * of_k).sum(-1)
    return (at_least_fp32(beta) * scores.flatten(2)).unflatten(-1, (-1, E)).sum(-1) + D


def _products(x: Tensor, biases: Tensor) -> Tensor:
    """Products [B,T,G,R,E] of x [B,T,G,E,K] and the biases of heads [G,R,E,K], each alone in deterministic mode."""
    if is_deterministic():
        return (x[:, :, :, None] * biases).sum(-1)
    return torch.einsum("btgek,grek->btgre", x, biases)


class Arguments(NamedTuple):
    o: Tensor  # [B,T,H,V], like v and gate
    v: Tensor
    own: Tensor  # [B,T,H]
    gate: Tensor | None


def composed(*args: Any) -> Tensor:
    """The formula in PyTorch, of the fields of `Arguments`."""
    a = Arguments(*args)
    dtype = a.o.dtype
    y = torch.addcmul(a.o, a.own.to(dtype)[..., None], a.v.to(dtype))
    if a.gate is None:
        return y
    gate = a.gate.to(dtype)
    factor = remake(silu(gate), silu, gate)
    return remake(y * factor, torch.mul, y, factor)


def reference(*args: Any) -> Tensor:
    """The formula, in at least fp32."""
    a = Arguments(*args)
    y = at_least_fp32(a.o) + at_least_fp32(a.own)[..., None] * at_least_fp32(a.v)
    if a.gate is not None:
        gate = at_least_fp32(a.gate)
        y = y * gate / (1 + (-gate).exp())
    return y.to(a.o.dtype)


def _limits(o: Tensor, *_: Any) -> str | None:
    return None if o.shape[-1] <= LARGEST else f"which takes heads of at most {LARGEST} channels"


OP = Op("skip_readout", reference=reference, torch=composed, gpu="kernels.skip_readout.gpu.op:forward", limits=_limits)


def skip_readout(o: Tensor, v: Tensor, own: Tensor, gate: Tensor | None = None) -> Tensor:
    """(o + own ⊙ v) ⊙ SiLU(gate), the readout of Mamba-2 and Mamba-3 (arXiv 2405.21060, 2603.15569), in one launch.

    Inside `recomputing()`, the backward pass recomputes the result.

    Args:
        o: Output of the recurrence [B,T,H,V].
        v: Values [B,T,H,V].
        own: Share of the value at a token that each head of it reads [B,T,H]; see `own_shares`.
        gate: Gate before its activation [B,T,H,V]; None for none.

    Returns:
        y [B,T,H,V] in the dtype of o.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if o.dim() != 4 or not o.shape[2] or not o.is_floating_point():
        raise ValueError(f"o: expected a floating [B,T,H,V] with at least one head, got {o.dtype} {tuple(o.shape)}")
    for name, shape, x in (("v", o.shape, v), ("own", o.shape[:3], own), ("gate", o.shape, gate)):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name}: expected {list(shape)}, got shape {tuple(x.shape)}")
    args = (o, v, own, gate)
    run = OP.choose(o, *args)
    y: Tensor = run(*args)
    return y if run is composed else remake(y, run, *args)
