"""One token of Mamba-3, from its projections to the input of its output projection."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.elementwise import sigmoid, softplus, tanh
from ..core.recurrence import at_least_fp32
from ..linear_recurrence import linear_recurrence
from ..norm import rms_norm
from ..recurrence_token import LARGEST, padded, without_casts
from ..rotation import rotation
from ..skip_readout import own_shares, skip_readout
from ..turns import angles_of, running_sums

SLOWEST = 1e-4  # smallest rate A


class Columns(NamedTuple):
    """Raw columns of the projection of a token."""

    q: Tensor  # C [B,1,G,K]
    k: Tensor  # B [B,1,G,K]
    v: Tensor  # [B,1,H,V]
    a: Tensor  # of the step dt [B,1,H]
    r: Tensor  # of the rate A [B,1,H]
    w: Tensor  # of the share λ [B,1,H]
    angles: Tensor  # [B,1,P]
    gate: Tensor | None = None  # before SiLU [B,1,H,V]


class Weights(NamedTuple):
    """Parameters of the layer."""

    q_norm: Tensor  # [K]
    k_norm: Tensor  # [K]
    q_bias: Tensor  # [H,K]
    k_bias: Tensor  # [H,K]
    dt_bias: Tensor  # [H]
    D: Tensor  # [H]


class Carried(NamedTuple):
    """Values of the previous token that a layer keeps besides its state."""

    angles: Tensor  # sums in full turns, from 0 to 1 [B,H,P], in fp64
    k: Tensor  # normalised [B,G,K]
    v: Tensor  # [B,H,V]
    written: Tensor  # λ dt [B,H]


def trapezoid(a: Tensor, r: Tensor, w: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log_decay −A·dt, dt and λ of raw a, r and w [B,T,H], in at least fp32."""
    a, r, w = map(at_least_fp32, (a, r, w))
    dt = softplus(a + dt_bias)
    rate = torch.where(r >= 0, 1 + r, 1 / (1 - r.clamp(max=0)))
    return -rate.clamp(min=SLOWEST) * dt, dt, sigmoid(w)


def trapezoid_token(
    columns: Columns, weights: Weights, carried: Carried, state: Tensor, *, eps: float, consume_state: bool = False
) -> tuple[Tensor, Carried, Tensor]:
    """Compute one token of Mamba-3 (arXiv 2603.15569), in one launch where possible; other calls run several ops.

    Args:
        columns: The token.
        weights: Parameters.
        carried: Values of the previous token.
        state: P [B,H,K,V] without the write of the previous token.
        eps: Added inside the roots of the norms of q and k.
        consume_state: Whether the next state may be written into `state` and `carried`.

    Returns:
        y [B,1,H,V], and the next `carried` and `state`.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    (B, T, G, K), (H, V), P = columns.q.shape, columns.v.shape[2:], columns.angles.shape[-1]
    if T != 1 or H % G or 2 * P > K:
        raise ValueError(f"columns: expected a token, H a multiple of G, and 2·P ≤ K, got {T}, {H}, {G}, {P}, {K}")
    of_columns = [(B, 1, G, K)] * 2 + [(B, 1, H, V)] + [(B, 1, H)] * 3 + [(B, 1, P), (B, 1, H, V)]
    for name, x, shape in (
        *zip(Columns._fields, columns, of_columns, strict=True),
        *zip(Weights._fields, weights, [(K,), (K,), (H, K), (H, K), (H,), (H,)], strict=True),
        *zip(Carried._fields, carried, [(B, H, P), (B, G, K), (B, H, V), (B, H)], strict=True),
        ("state", state, (B, H, K, V)),
    ):
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name}: expected {list(shape)}, got shape {tuple(x.shape)}")
    raw = [x for x in columns if x is not None]
    fits = without_casts([*raw, *weights, *carried, state], raw, state) and padded(K) * padded(V) <= LARGEST
    run = OP.choose(columns.v) if fits else composed
    y, carried, state = run(columns, weights, carried, state, eps, consume_state)
    return y, carried, state


def composed(
    columns: Columns, weights: Weights, carried: Carried, state: Tensor, eps: float, consume_state: bool
) -> tuple[Tensor, Carried, Tensor]:
    """The ops one after another; the arguments are those of `trapezoid_token`."""
    v, before = columns.v, carried.angles[:, None]
    log_decay, dt, share = trapezoid(columns.a, columns.r, columns.w, weights.dt_bias)
    rates = tanh(at_least_fp32(columns.angles))
    angles = (running_sums(angles_of(rates, dt), None)[0] + before).remainder(1)
    q, k = rms_norm(columns.q, weights.q_norm, eps), rms_norm(columns.k, weights.k_norm, eps)
    own = own_shares(q, k, share * dt, q_bias=weights.q_bias, k_bias=weights.k_bias, D=weights.D)
    o, after = linear_recurrence(
        rotation(q, weights.q_bias, angles.to(rates.dtype)),
        rotation(carried.k[:, None].to(k.dtype), weights.k_bias, before.to(rates.dtype)),
        carried.v[:, None].to(v.dtype),
        log_decay,
        log_decay.exp() * (carried.written[:, None] + (1 - share) * dt),
        scale=1.0,
        initial_state=state,
        return_state=True,
        consume_state=consume_state,
    )
    assert after is not None
    following = (x[:, 0].to(old.dtype, copy=True) for x, old in zip((angles, k, v, share * dt), carried, strict=True))
    return skip_readout(o, v, own, columns.gate), Carried(*following), after


OP = Op("trapezoid_token", reference=composed, torch=composed, gpu="kernels.trapezoid_token.gpu.op:forward")
