"""The readout of Mamba-3: the skip connection, what each token reads of the value it writes, and the output gate."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.autocast import without_autocast
from ..core.backend import Op
from ..core.deterministic import is_deterministic
from ..core.elementwise import silu
from ..core.recompute import remake
from ..core.recurrence import at_least_fp32
from ..rotation import biased

LARGEST = 4096  # the kernels hold whole heads in registers


class Arguments(NamedTuple):
    o: Tensor  # [B,T,H,V]
    q: Tensor  # [B,T,G·E,K], like k
    k: Tensor
    v: Tensor  # [B,T,H,V]
    beta: Tensor  # [B,T,H·E]
    q_bias: Tensor  # [H·E,K], like k_bias
    k_bias: Tensor
    D: Tensor  # [H]
    gate: Tensor | None  # [B,T,H,V]

    @property
    def subheads(self) -> int:
        return self.q_bias.shape[0] // self.D.shape[0]


def _products(x: Tensor, biases: Tensor) -> Tensor:
    """Products [B,T,G,R,E] of x [B,T,G,E,K] and the biases of heads [G,R,E,K], each alone in deterministic mode."""
    if is_deterministic():
        return (x[:, :, :, None] * biases).sum(-1)
    return torch.einsum("btgek,grek->btgre", x, biases)


def _scores(a: Arguments) -> Tensor:
    """(q + q_bias)·(k + k_bias) [B,T,H·E], without queries and keys of all heads."""
    groups = a.q.shape[2] // a.subheads
    q, k = (at_least_fp32(x).unflatten(2, (groups, a.subheads)) for x in (a.q, a.k))
    of_q, of_k = (x.unflatten(0, (groups, -1, a.subheads)) for x in (a.q_bias, a.k_bias))
    with without_autocast(q.device):
        crossed = _products(q, of_k) + _products(k, of_q)
    return (crossed + (q * k).sum(-1)[:, :, :, None] + (of_q * of_k).sum(-1)).flatten(2)


def composed(*args: Any) -> Tensor:
    """The formula in PyTorch, of the fields of `Arguments`, in the dtype of o but for the scores."""
    a = Arguments(*args)
    own = (a.beta * _scores(a)).unflatten(-1, (-1, a.subheads)).sum(-1) + a.D
    y = a.o + own.to(a.v.dtype)[..., None] * a.v
    if a.gate is None:
        return y
    factor = remake(silu(a.gate), silu, a.gate)
    return remake(y * factor, torch.mul, y, factor)


def reference(*args: Any) -> Tensor:
    """The formula, with queries and keys of all heads."""
    a = Arguments(*args)
    q, k = (biased(at_least_fp32(x), bias, a.subheads) for x, bias in ((a.q, a.q_bias), (a.k, a.k_bias)))
    own = (at_least_fp32(a.beta) * (q * k).sum(-1)).unflatten(-1, (-1, a.subheads)).sum(-1) + a.D
    y = at_least_fp32(a.o) + own[..., None] * at_least_fp32(a.v)
    if a.gate is not None:
        gate = at_least_fp32(a.gate)
        y = y * gate / (1 + (-gate).exp())
    return y.to(a.o.dtype)


def _limits(*args: Any) -> str | None:
    a = Arguments(*args)
    largest = max(a.o.shape[3], a.subheads * a.q.shape[3])
    return None if largest <= LARGEST else f"which takes heads of at most {LARGEST} channels"


OP = Op("skip_readout", reference=reference, torch=composed, gpu="kernels.skip_readout.gpu.op:forward", limits=_limits)


def skip_readout(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    q_bias: Tensor,
    k_bias: Tensor,
    D: Tensor,
    gate: Tensor | None = None,
) -> Tensor:
    """(o + (Σ β (q + q_bias)·(k + k_bias) + D) v) ⊙ SiLU(gate) (Mamba-3, arXiv 2603.15569), in one launch.

    The sum is over the E subheads of a head; H/G heads in a row share the q and k of a group. The sum is computed in at
    least fp32. Inside `recomputing()`, the backward pass recomputes the result.

    Args:
        o: Output of the recurrence [B,T,H,V].
        q: Queries [B,T,G·E,K], before a rotation.
        k: Keys [B,T,G·E,K], before the same rotation.
        v: Values [B,T,H,V].
        beta: Input gates of the token's own write [B,T,H·E].
        q_bias: Bias of the queries of each subhead of each head [H·E,K].
        k_bias: Bias of the keys [H·E,K].
        D: Weight of the skip connection [H].
        gate: Gate before its activation [B,T,H,V]; None for none.

    Returns:
        y [B,T,H,V] in the dtype of o.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if o.dim() != 4 or not o.shape[2] or not o.is_floating_point():
        raise ValueError(f"o: expected a floating [B,T,H,V] with at least one head, got {o.dtype} {tuple(o.shape)}")
    (*outer, H, _), (heads, K) = o.shape, q_bias.shape
    keys = q.shape[2] if q.dim() == 4 else 0
    if not keys or heads % H or keys % (heads // H) or heads % keys:
        raise ValueError(f"q: shape {tuple(q.shape)} does not fit {H} heads of o and {heads} heads of q_bias")
    shapes = {"q": (*outer, keys, K), "k": (*outer, keys, K), "v": o.shape, "beta": (*outer, heads)}
    shapes |= {"k_bias": (heads, K), "D": (H,), "gate": o.shape}
    for (name, shape), x in zip(shapes.items(), (q, k, v, beta, k_bias, D, gate), strict=True):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name}: expected {list(shape)}, got shape {tuple(x.shape)}")
    args = (o, q, k, v, beta, q_bias, k_bias, D, gate)
    run = OP.choose(o, *args)
    y: Tensor = run(*args)
    return y if run is composed else remake(y, run, *args)
