"""The readout of RWKV-7: the norm of each head, the bonus of the current token, and the output gate."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.recompute import remake
from ..core.recurrence import at_least_fp32

LARGEST = 4096  # the kernels hold whole heads in registers


class Arguments(NamedTuple):
    o: Tensor  # […,H,V]
    q: Tensor  # […,H·E,K], like k
    k: Tensor
    v: Tensor  # […,H,V]
    gate: Tensor  # […,H·V]
    r_k: Tensor  # [H·E·K]
    weight: Tensor  # [H,V], like bias
    bias: Tensor
    eps: float


def by_head(args: Arguments) -> Arguments:
    """The arguments with the subheads of each head side by side: q and k […,H,E·K], the gate […,H,V], r_k [H,E·K]."""
    H, V = args.weight.shape
    q, k, gate = (x.flatten(x.dim() - 2).unflatten(-1, (H, -1)) for x in (args.q, args.k, args.gate.unsqueeze(-1)))
    return args._replace(q=q, k=k, gate=gate, r_k=args.r_k.view(H, -1))


def composed(*args: Any) -> Tensor:
    """The formula in PyTorch, of the fields of `Arguments`."""
    a = by_head(Arguments(*args))
    o, q, k, v, gate, r_k, weight, bias = (at_least_fp32(x) for x in a[:8])
    normed = torch.nn.functional.layer_norm(o, o.shape[-1:], eps=a.eps) * weight + bias
    return ((normed + (q * k * r_k).sum(-1, keepdim=True) * v).flatten(-2) * gate.flatten(-2)).to(a.o.dtype)


def reference(*args: Any) -> Tensor:
    """The formula, with the mean and the variance by their definitions."""
    a = by_head(Arguments(*args))
    o, q, k, v, gate, r_k, weight, bias = (at_least_fp32(x) for x in a[:8])
    centred = o - o.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + a.eps).sqrt() * weight + bias
    own = (q * k * r_k).sum(-1)[..., None] * v
    return ((normed + own).flatten(-2) * gate.flatten(-2)).to(a.o.dtype)


def _limits(o: Tensor, q: Tensor, *rest: Any) -> str | None:
    largest = max(o.shape[-1], q.shape[-2] // o.shape[-2] * q.shape[-1])
    return None if largest <= LARGEST else f"which takes heads of at most {LARGEST} channels"


OP = Op(
    "bonus_readout", reference=reference, torch=composed, gpu="kernels.bonus_readout.gpu.op:forward", limits=_limits
)


def bonus_readout(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    r_k: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """(norm(o) ⊙ weight + bias + (Σ q ⊙ k ⊙ r_k) v) ⊙ gate (RWKV-7, arXiv 2503.14456), in one launch.

    The norm is (o − mean o) / √(var o + eps) of each head, and the sum adds up the channels of a head's E subheads.
    Computed in at least fp32. Inside `recomputing()`, the backward pass recomputes the result.

    Args:
        o: Output of the recurrence […,H,V].
        q: Queries […,H·E,K].
        k: Keys […,H·E,K].
        v: Values […,H,V].
        gate: Gate after its activation […,H·V].
        r_k: Weight of each channel in the sum [H·E·K].
        weight: Scale of the norm [H,V].
        bias: Bias of the norm [H,V].
        eps: Added inside the root.

    Returns:
        y […,H·V] in the dtype of o.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if o.dim() < 2 or not o.shape[-2] or not o.is_floating_point():
        raise ValueError(f"o: expected a floating […,H,V] with at least one head, got {o.dtype} {tuple(o.shape)}")
    if q.dim() != o.dim() or q.shape[-2] % o.shape[-2]:
        raise ValueError(f"q: expected […,H·E,K] for o […,H,V] of {tuple(o.shape)}, got shape {tuple(q.shape)}")
    *outer, H, V = o.shape
    shapes = {
        "q": (q, [*outer, *q.shape[-2:]]),
        "k": (k, [*outer, *q.shape[-2:]]),
        "v": (v, [*outer, H, V]),
        "gate": (gate, [*outer, H * V]),
        "r_k": (r_k, [q.shape[-2] * q.shape[-1]]),
        "weight": (weight, [H, V]),
        "bias": (bias, [H, V]),
    }
    for name, (x, shape) in shapes.items():
        if list(x.shape) != shape:
            raise ValueError(f"{name}: expected {shape}, got shape {tuple(x.shape)}")
    args = (o, q, k, v, gate, r_k, weight, bias, eps)
    run = OP.choose(o, *args)
    return remake(run(*args), run, *args)
