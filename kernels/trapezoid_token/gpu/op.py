"""One token of Mamba-3 in one launch: a program has a head of a sequence, and its whole state."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.recurrence import writable
from ...delta_gates.gpu.op import softplus
from ...gpu.launch import LaunchSpec, next_power_of_2
from ...gpu.overlap import prefetch, wait
from ...gpu.paths import note
from ...gpu.rows import load, rows_of
from ...gpu.tiles import sigmoid
from ...linear.gpu.op import tanh
from ...recurrence_token.gpu.op import MOST_WARPS, PER_WARP, WHOLE_TOKEN, once
from ...rotation.gpu.op import TURN
from ...turns.gpu.op import UNIT, WHOLE
from .. import SLOWEST, Carried, Columns, Weights

LEAST_RATE = tl.constexpr(SLOWEST)


@triton.jit
def normed(y, factor, eps, K: tl.constexpr, DTYPE: tl.constexpr):
    """The norm of y, of which K numbers are not padding, rounded as in memory."""
    return (y * tl.rsqrt(tl.sum(y * y, 0) / K + eps) * factor).to(DTYPE).to(tl.float32)


@triton.jit
def rotated(y, angles):
    """The vector y [2·PAIRS] with its pairs rotated by angles [PAIRS] in full turns."""
    radians = angles.to(tl.float32) * TURN
    cos, sin = tl.cos(radians), tl.sin(radians)
    a, b = tl.split(tl.reshape(y, [angles.shape[0], 2]))
    return once(tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), [2 * angles.shape[0]]))


@triton.jit
def advance_token(
    q,  # [B,G·K], with any stride of rows, as all up to the gate
    k,
    v,  # [B,H·V]
    a,  # [B,H]
    r,
    w,
    rates,  # [B,P]
    gate,  # [B,H·V]
    q_norm,  # [K]
    k_norm,
    q_bias,  # [H,K]
    k_bias,
    dt_bias,  # [H]
    D,
    angles,  # [B,H,P], which becomes that of the next token, as the others except k
    past_k,  # [B,G,K]
    past_v,  # [B,H,V]
    written,  # [B,H]
    state,  # [B,H,K,V]
    k_next,
    y,  # [B,H,V]
    eps,
    STRIDES: tl.constexpr,  # of rows
    H: tl.constexpr,
    G: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    head, g = row * H + h, h // (H // G)
    prefetch(state, head * (K * V), K * V, K * V, OVERLAP)
    prefetch(q_bias, h * K, K, K, OVERLAP)
    prefetch(k_bias, h * K, K, K, OVERLAP)
    wait(OVERLAP)
    i, c, p = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BK // 2)
    at, inside = i[:, None] * V + c[None, :], (i < K)[:, None] & (c < V)[None, :]
    state += head * (K * V)
    S = tl.load(state + at, mask=inside, other=0.0)
    # all loads begin before any result
    query = load(q, row * STRIDES[0] + g * K + i, i < K)
    key = load(k, row * STRIDES[1] + g * K + i, i < K)
    value = load(v, row * STRIDES[2] + h * V + c, c < V)
    dt = load(a, row * STRIDES[3] + h, True) + load(dt_bias, h, True)
    rate = load(r, row * STRIDES[4] + h, True)
    share = load(w, row * STRIDES[5] + h, True)
    turn = load(rates, row * STRIDES[6] + p, p < P)
    of_q_norm, of_k_norm = load(q_norm, i, i < K), load(k_norm, i, i < K)
    of_query, of_key = load(q_bias, h * K + i, i < K), load(k_bias, h * K + i, i < K)
    before = tl.load(angles + head * P + p, mask=p < P, other=0.0)
    past = load(past_k, (row * G + g) * K + i, i < K)
    previous = load(past_v, head * V + c, c < V)
    rest, own = load(written, head, True), load(D, h, True)
    if gate is not None:
        z = load(gate, row * STRIDES[7] + h * V + c, c < V)
    query = normed(query, of_q_norm, eps, K, q.dtype.element_ty)
    key = normed(key, of_k_norm, eps, K, q.dtype.element_ty)
    dt = softplus(dt)
    rate = tl.where(rate >= 0, 1 + rate, 1 / (1 - tl.minimum(rate, 0.0)))
    share = tl.sigmoid(share)
    decay = tl.exp(-tl.maximum(rate, LEAST_RATE) * dt)
    beta = decay * (rest + (1 - share) * dt)
    after = before + ((tanh(turn) * dt * 0.5).to(tl.float64) * UNIT + WHOLE - WHOLE) / UNIT
    after -= tl.floor(after)
    own += share * dt * tl.sum((query + of_query) * (key + of_key), 0)
    tl.debug_barrier()  # other threads may still have to read what is written next
    tl.store(angles + head * P + p, after, mask=p < P)
    tl.store(past_v + head * V + c, value.to(past_v.dtype.element_ty), mask=c < V)
    tl.store(written + head, (share * dt).to(written.dtype.element_ty))
    if h % (H // G) == 0:
        tl.store(k_next + (row * G + g) * K + i, key.to(k_next.dtype.element_ty), mask=i < K)
    S = S * decay + rotated(past + of_key, before)[:, None] * (beta * previous)[None, :]
    tl.store(state + at, S, mask=inside)
    o = tl.sum(rotated(query + of_query, after)[:, None] * S, 0) + own * value
    if gate is not None:
        o *= z * sigmoid(z)
    tl.store(y + head * V + c, o.to(y.dtype.element_ty), mask=c < V)


@lru_cache(maxsize=1024)
def launch(rows: int, strides: tuple[int, ...], H: int, G: int, K: int, V: int, P: int, eps: float) -> LaunchSpec:
    """The launch for these sizes."""
    blocks: dict[str, Any] = {"BK": next_power_of_2(K), "BV": next_power_of_2(V)}
    constants = {"STRIDES": strides, "H": H, "G": G, "K": K, "V": V, "P": P, **blocks}
    warps = max(1, min(blocks["BK"] * blocks["BV"] // PER_WARP, MOST_WARPS))
    return LaunchSpec(advance_token, rows * H, eps, **constants, warps=warps, overlap=True)


def forward(
    columns: Columns, weights: Weights, carried: Carried, state: Tensor, eps: float, consume_state: bool
) -> tuple[Tensor, Carried, Tensor]:
    """The results of `trapezoid_token`, whose arguments these are."""
    note(WHOLE_TOKEN)
    (B, _, G, K), (H, V), P = columns.q.shape, columns.v.shape[2:], columns.angles.shape[-1]
    inputs: list[Any] = [(None, 0, 0) if x is None else rows_of(x.flatten(2)) for x in columns]
    memories = [carried.angles, carried.k, carried.v, carried.written, state.to(torch.float32)]
    memories = [x if consume_state and writable(x) else x.contiguous().clone() for x in memories]
    k_next, y = new(memories[1]), new(columns.v, B, 1, H, V)
    parameters = (x.contiguous() for x in weights)
    call = launch(B, tuple(stride for *_, stride in inputs), H, G, K, V, P, float(eps))
    call(*(x for x, *_ in inputs), *parameters, *memories, k_next, y)
    angles, _, v, written, state = memories
    return y, Carried(angles, k_next, v, written), state
