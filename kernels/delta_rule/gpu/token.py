"""One token of a Gated DeltaNet or KDA layer in one launch: a program has a head of a sequence, and its whole state."""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.recurrence import writable
from ...delta_gates import GateInputs
from ...delta_gates.gpu.op import decay_of
from ...features.arguments import FeatureStream
from ...features.gpu.kernels import activate, normalise
from ...features.gpu.op import strided
from ...features.gpu.token import own_history
from ...features.stages import EPS
from ...gpu.launch import LaunchSpec
from ...gpu.overlap import prefetch, wait
from ...gpu.paths import note
from ...gpu.rows import load, rows_of
from ...gpu.tiles import sigmoid
from ...norm import GatedNorm
from ...norm.gpu.op import strided as heads_of_rows
from ..token import padded
from .select import WHOLE_TOKEN

PER_WARP, MOST_WARPS = 4096, 16  # elements of the state; with few warps, sums wait less for other threads


@triton.jit
def prefetch_head(weight, history, row, h, STREAM: tl.constexpr, OVERLAP: tl.constexpr):
    """Start to load the taps and the history of a head."""
    C: tl.constexpr = STREAM[0]
    W: tl.constexpr = STREAM[1]
    SIZE: tl.constexpr = STREAM[2]
    prefetch(weight, h * SIZE * W, SIZE * W, SIZE * W, OVERLAP)
    for j in tl.static_range(W - 1):
        prefetch(history, (row * (W - 1) + j) * C + h * SIZE, SIZE, SIZE, OVERLAP)


@triton.jit
def places(h, STREAM: tl.constexpr):
    """Channels [BLOCK,1] and taps [1,TAPS] of a head, and the mask of those that exist."""
    W: tl.constexpr = STREAM[1]
    SIZE: tl.constexpr = STREAM[2]
    BLOCK: tl.constexpr = STREAM[3]
    TAPS: tl.constexpr = STREAM[6]
    within, j = tl.arange(0, BLOCK)[:, None], tl.arange(0, TAPS)[None, :]
    return h * SIZE + within, j, (within < SIZE) & (j < W)


@triton.jit
def window_of(x, weight, history, row, h, x_row, STREAM: tl.constexpr):
    """History, token and taps of a head, each [BLOCK,TAPS] with zeros elsewhere: all loads begin before any result."""
    C: tl.constexpr = STREAM[0]
    W: tl.constexpr = STREAM[1]
    c, j, exists = places(h, STREAM)
    past = tl.load(history + (row * (W - 1) + j) * C + c, mask=exists & (j < W - 1), other=0.0)
    token = tl.load(x + row * x_row + c + 0 * j, mask=exists & (j == W - 1), other=0.0)
    return past, token, tl.load(weight + c * W + j, mask=exists, other=0.0)


@triton.jit
def head_of(window, bias, h, DTYPE: tl.constexpr, STREAM: tl.constexpr, EPS: tl.constexpr):
    """The features of a head [BLOCK], rounded as in memory.

    Its channels are rows, whose sums several threads compute together: otherwise the compiler would repeat everything
    in each thread that needs a channel.
    """
    SIZE: tl.constexpr = STREAM[2]
    BLOCK: tl.constexpr = STREAM[3]
    ACTIVATION: tl.constexpr = STREAM[4]
    NORM: tl.constexpr = STREAM[5]
    z = tl.sum((window[0].to(tl.float32) + window[1].to(tl.float32)) * window[2].to(tl.float32), 1)
    inside = tl.arange(0, BLOCK) < SIZE
    if bias is not None:
        z += load(bias, h * SIZE + tl.arange(0, BLOCK), inside)
    y = normalise(activate(z, inside, ACTIVATION, NORM)[None, :], NORM, EPS)
    return tl.where(inside[None, :], y, 0.0).to(DTYPE).to(tl.float32).reshape(BLOCK)


@triton.jit
def keep(window, history, row, h, STREAM: tl.constexpr):
    """Write the history of the next token."""
    C: tl.constexpr = STREAM[0]
    W: tl.constexpr = STREAM[1]
    c, j, exists = places(h, STREAM)
    at = (row * (W - 1) + j - 1) * C + c
    both = window[0].to(tl.float32) + window[1].to(tl.float32)
    tl.store(history + at, both.to(history.dtype.element_ty), mask=exists & (j > 0))


@triton.jit(do_not_specialize=["a_row", "b_row"])
def advance_token(
    q,  # [B,H·K], with any stride of rows, as k and v
    q_weight,  # [H·K,1,W]
    q_bias,  # [H·K]
    q_history,  # [B,W−1,H·K], which becomes that of the next token
    k,
    k_weight,
    k_bias,
    k_history,
    v,
    v_weight,
    v_bias,
    v_history,
    a,  # [B,H], or [B,H·K] for decays per channel, with any stride of rows, as b
    A_log,
    dt_bias,
    b,
    bias,
    gate,  # [B,H·V], with any stride of rows
    scale_of_norm,  # [V]
    state,  # [B,H,K,V], which becomes the next one
    y,  # [B,H,V]
    q_row,
    k_row,
    v_row,
    a_row,
    b_row,
    gate_row,
    largest,
    scale,
    eps,
    lower,  # bound of the log decays if they are bounded
    Q: tl.constexpr,  # C, W, SIZE, BLOCK, ACTIVATION, NORM, TAPS
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    H: tl.constexpr,
    CHANNELS: tl.constexpr,  # whether each key channel has a decay
    BOUNDED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,  # whether that is the activation of the gate, rather than SiLU
    EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    K: tl.constexpr = KEY[2]
    V: tl.constexpr = VALUE[2]
    BK: tl.constexpr = KEY[3]
    BV: tl.constexpr = VALUE[3]
    row, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    head = row * H + h
    prefetch(state, head * (K * V), K * V, K * V, OVERLAP)
    prefetch_head(q_weight, q_history, row, h, Q, OVERLAP)
    prefetch_head(k_weight, k_history, row, h, KEY, OVERLAP)
    prefetch_head(v_weight, v_history, row, h, VALUE, OVERLAP)
    prefetch(A_log, 0, H, H, OVERLAP)
    prefetch(dt_bias, h * K if CHANNELS else 0, K if CHANNELS else H, K if CHANNELS else H, OVERLAP)
    if scale_of_norm is not None:
        prefetch(scale_of_norm, 0, V, V, OVERLAP)
    wait(OVERLAP)
    r, c = tl.arange(0, BK), tl.arange(0, BV)
    at = r[:, None] * V + c[None, :]
    state += head * (K * V)
    inside = (r < K)[:, None] & (c < V)[None, :]
    q_window = window_of(q, q_weight, q_history, row, h, q_row, Q)
    k_window = window_of(k, k_weight, k_history, row, h, k_row, KEY)
    v_window = window_of(v, v_weight, v_history, row, h, v_row, VALUE)
    S = tl.load(state + at, mask=inside, other=0.0)
    if CHANNELS:
        step = (load(a, row * a_row + h * K + r, r < K) + load(dt_bias, h * K + r, r < K))[:, None]
    else:
        step = load(a, row * a_row + h, True) + load(dt_bias, h, True)
    rate = tl.exp(load(A_log, h, True))
    raw = load(b, row * b_row + h, True)
    if bias is not None:
        raw += load(bias, h, True)
    opened = load(gate, row * gate_row + h * V + c, c < V)
    opened = sigmoid(opened) if SIGMOID else opened * sigmoid(opened)
    if scale_of_norm is not None:
        factor = load(scale_of_norm, c, c < V)
    DTYPE: tl.constexpr = q.dtype.element_ty
    query = head_of(q_window, q_bias, h, DTYPE, Q, EPS)
    key = head_of(k_window, k_bias, h, DTYPE, KEY, EPS)
    value = head_of(v_window, v_bias, h, DTYPE, VALUE, EPS)
    tl.debug_barrier()  # other threads may still have to read what is written next
    keep(q_window, q_history, row, h, Q)
    keep(k_window, k_history, row, h, KEY)
    keep(v_window, v_history, row, h, VALUE)
    S *= tl.exp(decay_of(step, rate, lower, BOUNDED))
    update = largest * tl.sigmoid(raw) * (value - tl.sum(key[:, None] * S, 0))
    S += key[:, None] * update[None, :]
    tl.store(state + at, S, mask=inside)
    o = (tl.sum(query[:, None] * S, 0) * scale).to(y.dtype.element_ty).to(tl.float32)
    if GATE_FIRST:
        o *= opened
    o *= tl.rsqrt(tl.sum(o * o, 0) / V + eps)
    if scale_of_norm is not None:
        o *= factor
    if not GATE_FIRST:
        o *= opened
    tl.store(y + head * V + c, o.to(y.dtype.element_ty), mask=c < V)


@lru_cache(maxsize=1024)
def launch(
    streams: tuple[tuple[Any, ...], ...], rows: int, flags: tuple[bool, ...], H: int, *numbers: Any
) -> LaunchSpec:
    """The launch for streams of these shapes; `numbers` are the arguments between the tensors and the constants."""
    elements = streams[1][3] * streams[2][3]
    constants: dict[str, Any] = dict(zip(("Q", "KEY", "VALUE"), streams, strict=True))
    constants |= {"H": H, **dict(zip(("CHANNELS", "BOUNDED", "GATE_FIRST", "SIGMOID"), flags, strict=True)), "EPS": EPS}
    warps = max(1, min(elements // PER_WARP, MOST_WARPS))
    return LaunchSpec(advance_token, rows * H, *numbers, **constants, warps=warps, overlap=True)


def forward(
    streams: Sequence[FeatureStream],
    gates: GateInputs,
    norm: GatedNorm,
    initial_state: Tensor,
    scale: float,
    consume_state: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The results of `delta_rule_token`, whose arguments these are."""
    note(WHOLE_TOKEN)
    v = streams[2].x
    B, _, H, _ = v.shape
    histories = [own_history(stream) for stream in streams]
    state = initial_state.to(torch.float32).contiguous()
    if state is initial_state and not (consume_state and writable(state)):
        state = state.clone()
    tensors: list[Any] = []
    about, strides = [], []
    for stream, history in zip(streams, histories, strict=True):
        x, row, _ = strided(stream.x)
        assert stream.weight is not None
        size = stream.size
        sizes = (stream.channels, stream.taps, size, padded(size))
        about.append((*sizes, stream.activation, stream.norm, padded(stream.taps)))
        tensors += [x, stream.weight.contiguous(), None if stream.bias is None else stream.bias.contiguous(), history]
        strides.append(row)
    gates = gates.multiplied()
    assert gates.b is not None
    channels = gates.dt_bias.dim() == 2
    decays = gates.a.flatten(2) if channels else gates.a
    (a, _, a_row), (b, _, b_row), (gate, gate_row) = rows_of(decays), rows_of(gates.b), heads_of_rows(norm.gate)
    parameters = [None if x is None else x.contiguous() for x in (gates.A_log, gates.dt_bias, gates.bias, norm.weight)]
    A_log, dt_bias, bias, weight = parameters
    y = new(v, *v.shape)
    numbers = (*strides, a_row, b_row, gate_row, float(gates.largest), float(scale), float(norm.eps), gates.lower)
    flags = (channels, gates.lower_bound is not None, norm.gate_first, norm.activation == "sigmoid")
    queue = launch(tuple(about), B, flags, H, *numbers)
    queue(*tensors, a, A_log, dt_bias, b, bias, gate, weight, state, y)
    return y, histories, state
