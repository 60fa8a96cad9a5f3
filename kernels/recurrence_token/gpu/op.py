"""One token of a layer with a matrix state in one launch: a program has a head of a sequence, and its whole state."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.recurrence import writable
from ...delta_gates import GateInputs
from ...delta_gates.gpu.op import decay_of, softplus
from ...features.arguments import FeatureStream
from ...features.gpu.kernels import activate, normalise
from ...features.gpu.op import strided
from ...features.gpu.token import own_history
from ...features.stages import EPS
from ...forget_gate.gpu.op import complement, log_forget_of, log_sigmoid, odds_of
from ...gpu.launch import LaunchSpec, next_power_of_2
from ...gpu.overlap import prefetch, wait
from ...gpu.paths import KernelPath, always, note
from ...gpu.rows import load, rows_of
from ...gpu.tiles import sigmoid
from ...linear.gpu.op import tanh
from ...norm import GatedNorm
from ...norm.gpu.op import strided as heads_of_rows
from .. import CappedGates, Decay, Strength, TiedGates, TokenOps, TokenResult

WHOLE_TOKEN = KernelPath(
    "whole_token",
    when=always,
    why="one token of a layer from its projections on, no gradients: a single launch computes features, gates, state "
    "and normalised output",
)
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
    token = tl.load(x + row * x_row + c + 0 * j, mask=exists & (j == W - 1), other=0.0)
    past, taps = tl.zeros_like(token), tl.full(token.shape, 1.0, tl.float32)
    if W > 1:
        past = tl.load(history + (row * (W - 1) + j) * C + c, mask=exists & (j < W - 1), other=0.0)
    if weight is not None:
        taps = tl.load(weight + c * W + j, mask=exists, other=0.0)
    return past, token, taps


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
    if W > 1:
        c, j, exists = places(h, STREAM)
        at = (row * (W - 1) + j - 1) * C + c
        both = window[0].to(tl.float32) + window[1].to(tl.float32)
        tl.store(history + at, both.to(history.dtype.element_ty), mask=exists & (j > 0))


@triton.jit
def once(x):
    """The vector x [N] of key channels, of which each thread computes few numbers.

    The compiler repeats all that a vector is made of in each thread that needs a number of it. It does not look behind
    a sum over rows [2,N], whose threads are not those of the state's rows.
    """
    return tl.sum(tl.where(tl.arange(0, 2)[:, None] == 0, x[None, :], 0.0), 0)


@triton.jit
def rows_joined(a, b):
    """The vector [2·N] of a [N] and b [N], one after the other."""
    return tl.reshape(tl.permute(tl.join(a, b), (1, 0)), [2 * a.shape[0]])


@triton.jit
def positioned(y, position, rates, amplitude, h, TURN: tl.constexpr, STREAM: tl.constexpr, DTYPE: tl.constexpr):
    """The features of a head with its position, rounded; with TURN = doubled, twice as many."""
    SIZE: tl.constexpr = STREAM[2]
    BLOCK: tl.constexpr = STREAM[3]
    if TURN == "pairs":
        PAIRS: tl.constexpr = BLOCK // 2
        angle = position * tl.load(rates + tl.arange(0, PAIRS)).to(tl.float32)
        cos, sin = tl.cos(angle) * amplitude, tl.sin(angle) * amplitude
        a, b = tl.split(tl.permute(tl.reshape(y, [2, PAIRS]), (1, 0)))
        y = once(rows_joined(a * cos - b * sin, a * sin + b * cos)).to(DTYPE).to(tl.float32)
    elif TURN == "doubled":
        c = tl.arange(0, BLOCK)
        angle = position * load(rates, h * SIZE + c, c < SIZE)
        y = once(rows_joined(y * tl.cos(angle), y * tl.sin(angle))).to(DTYPE).to(tl.float32)
    return y


@triton.jit
def capped(x, CAP: tl.constexpr):
    """CAP · tanh(x / CAP), or x with a CAP of None."""
    return x if CAP is None else CAP * tanh(x / CAP)


@triton.jit(do_not_specialize=["a_row", "b_row", "w_row", "layer"])
def advance_token(
    q,  # [B,G·K], with any stride of rows, as k and v
    q_weight,  # [G·K,1,W], or None
    q_bias,  # [G·K]
    q_history,  # [B,W−1,G·K]
    q_next,  # the history of the next token: the same memory if no other head reads it
    k,
    k_weight,
    k_bias,
    k_history,
    k_next,
    v,
    v_weight,
    v_bias,
    v_history,
    v_next,
    a,  # log decays or raw ones [H], [B,H] or per channel [B,H·K], with any stride of rows, as b; or lower bounds
    A_log,
    dt_bias,
    b,  # [B,STEPS·H], or per channel [B,H·K]
    bias,
    w,  # [B,H·V]
    feedback,  # [G]
    correction,  # [G]
    gate,  # [B,H·V], with any stride of rows
    scale_of_norm,  # [V]
    skip,  # [H]
    positions,  # [B]
    rates,
    following,  # [B]: the next positions
    stabilisers,  # [B,H], which become the next ones, as the state does
    state,  # [B,H,K,V], with a divisor [B,H,K,V+1]
    y,  # [B,H,V]
    q_row,
    k_row,
    v_row,
    a_row,
    b_row,
    w_row,
    gate_row,
    largest,
    scale,
    eps,
    lower,  # bound of the log decays if they are bounded
    amplitude,
    layer,
    Q: tl.constexpr,  # C, W, SIZE, BLOCK, ACTIVATION, NORM, TAPS
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    H: tl.constexpr,
    REPEATS: tl.constexpr,  # heads that share queries and keys
    DECAY: tl.constexpr,  # none, constant, given, softplus, bounded, tied or capped
    CHANNELS: tl.constexpr,  # whether each key channel has a decay
    BETA: tl.constexpr,  # none, sigmoid, channels, step or capped
    DELTA: tl.constexpr,
    STEPS: tl.constexpr,
    UNIT: tl.constexpr,  # whether the erase key of the feedback is the key
    TURN: tl.constexpr,  # none, pairs or doubled
    GATE: tl.constexpr,  # none, silu or sigmoid
    GATE_FIRST: tl.constexpr,
    NORMED: tl.constexpr,
    CENTRED: tl.constexpr,
    DIVISOR_EPS: tl.constexpr,
    CAP: tl.constexpr,
    LAYERS: tl.constexpr,  # rows of lower bounds
    LAYER_BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    SIZE: tl.constexpr = KEY[2]
    V: tl.constexpr = VALUE[2]
    HALF: tl.constexpr = KEY[3]
    K: tl.constexpr = 2 * SIZE if TURN == "doubled" else SIZE
    BK: tl.constexpr = 2 * HALF if TURN == "doubled" else HALF
    BV: tl.constexpr = VALUE[3]
    WIDTH: tl.constexpr = V if DIVISOR_EPS is None else V + 1
    DTYPE: tl.constexpr = q.dtype.element_ty
    row, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    head, g = row * H + h, h // REPEATS
    G: tl.constexpr = H // REPEATS
    prefetch(state, head * (K * WIDTH), K * WIDTH, K * WIDTH, OVERLAP)
    prefetch_head(q_weight, q_history, row, g, Q, OVERLAP)
    for i in tl.static_range(STEPS):
        prefetch_head(k_weight, k_history, row, i * G + g, KEY, OVERLAP)
        prefetch_head(v_weight, v_history, row, i * H + h, VALUE, OVERLAP)
    prefetch(A_log, 0, H, H, OVERLAP)
    prefetch(dt_bias, h * K if CHANNELS else 0, K if CHANNELS else H, K if CHANNELS else H, OVERLAP)
    if scale_of_norm is not None:
        scale_of_norm += h * V if CENTRED else 0
    prefetch(scale_of_norm, 0, V, V, OVERLAP)
    wait(OVERLAP)
    r, c = tl.arange(0, BK), tl.arange(0, BV)
    channel = r // HALF * SIZE + r % HALF  # row of the state
    in_key = r % HALF < SIZE
    at = channel[:, None] * WIDTH + c[None, :]
    state += head * (K * WIDTH)
    inside = in_key[:, None] & (c < V)[None, :]
    q_window = window_of(q, q_weight, q_history, row, g, q_row, Q)
    k_windows, v_windows = (), ()
    for i in tl.static_range(STEPS):
        k_windows = k_windows + window_of(k, k_weight, k_history, row, i * G + g, k_row, KEY)
        v_windows = v_windows + window_of(v, v_weight, v_history, row, i * H + h, v_row, VALUE)
    S = tl.load(state + at, mask=inside, other=0.0)
    if DIVISOR_EPS is not None:
        n = tl.load(state + channel[:, None] * WIDTH + V, mask=in_key[:, None], other=0.0)
        floor = 1.0
    if TURN != "none":
        position = tl.load(positions + row)
    if DECAY == "constant":
        decay = tl.exp(load(a, h, True))
    elif DECAY == "given":
        if CHANNELS:
            decay = once(tl.exp(load(a, row * a_row + h * K + channel, in_key)))[:, None]
        else:
            decay = tl.exp(load(a, row * a_row + h, True))
    elif DECAY == "softplus" or DECAY == "bounded":
        rate = tl.exp(load(A_log, h, True))
        if CHANNELS:
            step = load(a, row * a_row + h * K + channel, in_key) + load(dt_bias, h * K + channel, in_key)
            decay = once(tl.exp(decay_of(step, rate, lower, DECAY == "bounded")))[:, None]
        else:
            step = load(a, row * a_row + h, True) + load(dt_bias, h, True)
            decay = tl.exp(decay_of(step, rate, lower, DECAY == "bounded"))
    strengths = ()
    if DECAY == "capped":
        forget = log_sigmoid(capped(load(a, row * a_row + h, True) + load(dt_bias, h, True), CAP))
        write = capped(load(b, row * b_row + h, True) + load(bias, h, True), CAP)
        if stabilisers is None:
            strengths, decay = (tl.sigmoid(write),), tl.exp(forget)
        else:
            past = forget.to(tl.float64) + tl.load(stabilisers + head).to(tl.float64)
            m = tl.maximum(past, write.to(tl.float64))
            strengths, decay = (tl.exp((write - m).to(tl.float32)),), tl.exp((past - m).to(tl.float32))
            floor = tl.exp(-m.to(tl.float32))
    for i in tl.static_range(STEPS):
        if BETA == "sigmoid":
            raw = load(b, row * b_row + i * H + h, True)
            if bias is not None:
                raw += load(bias, i * H + h, True)
            strengths = strengths + (largest * tl.sigmoid(raw),)
        elif BETA == "channels":
            strengths = strengths + (once(largest * tl.sigmoid(load(b, row * b_row + h * K + channel, in_key))),)
            written = sigmoid(load(w, row * w_row + h * V + c, c < V))
        elif BETA == "step":
            strengths = strengths + (softplus(step),)
    if feedback is not None:
        fed_back = tl.sigmoid(load(feedback, g, True))
        if correction is not None:
            corrected = load(correction, g, True) * fed_back
    if skip is not None:
        skipped = load(skip, h, True)
    if GATE != "none":
        opened = load(gate, row * gate_row + h * V + c, c < V)
        opened = sigmoid(opened) if GATE == "sigmoid" else opened * sigmoid(opened)
    if scale_of_norm is not None:
        factor = load(scale_of_norm, c, c < V)
    query = head_of(q_window, q_bias, g, DTYPE, Q, EPS)
    if TURN != "none":
        query = positioned(query, position.to(tl.float32), rates, amplitude, g, TURN, Q, DTYPE)
        if h == 0:
            tl.store(following + row, position + 1)
    for i in tl.static_range(STEPS):
        k_window = (k_windows[3 * i], k_windows[3 * i + 1], k_windows[3 * i + 2])
        v_window = (v_windows[3 * i], v_windows[3 * i + 1], v_windows[3 * i + 2])
        key = head_of(k_window, k_bias, i * G + g, DTYPE, KEY, EPS)
        value = head_of(v_window, v_bias, i * H + h, DTYPE, VALUE, EPS)
        if TURN != "none":
            key = positioned(key, position.to(tl.float32), rates, amplitude, g, TURN, KEY, DTYPE)
        if DECAY == "tied":
            forget = log_sigmoid(key)
            if LAYERS:
                forget = log_forget_of(forget, odds_of(a, h * K + channel, in_key, layer, LAYERS, LAYER_BLOCK, H * K))
            forget = once(forget)
            key = once(tl.where(in_key, complement(forget), 0.0)).to(DTYPE).to(tl.float32)
            decay = once(tl.exp(forget))[:, None]
        tl.debug_barrier()  # other threads may still have to read what is written next
        if h % REPEATS == 0:
            if i == 0:
                keep(q_window, q_next, row, g, Q)
            keep(k_window, k_next, row, i * G + g, KEY)
        keep(v_window, v_next, row, i * H + h, VALUE)
        if stabilisers is not None:
            tl.store(stabilisers + head, m.to(stabilisers.dtype.element_ty))
        erase = key
        if feedback is not None:
            if correction is not None:
                query = (query - corrected * key).to(DTYPE).to(tl.float32)
            query = normalise(query[None, :], "l2", EPS).to(DTYPE).to(tl.float32).reshape(BK)
            key = normalise(key[None, :], "l2", EPS).to(DTYPE).to(tl.float32).reshape(BK)
            erase = key if UNIT else (fed_back * key).to(DTYPE).to(tl.float32)
            memory = tl.sum(erase[:, None] * S, 0)
        if BETA == "channels":
            erase = strengths[i].to(DTYPE).to(tl.float32) * key
            value = (written * value).to(DTYPE).to(tl.float32)
        if DECAY != "none" and i == 0:
            S *= decay
            if DIVISOR_EPS is not None:
                n *= decay
        update = value
        if DELTA:
            if feedback is None:
                memory = tl.sum(erase[:, None] * S, 0)
            update = value - memory
        if BETA == "sigmoid" or BETA == "step" or BETA == "capped":
            update *= strengths[i]
        S += key[:, None] * update[None, :]
        if DIVISOR_EPS is not None:
            n += key[:, None] * (1.0 if BETA == "none" else strengths[i])
    tl.store(state + at, S, mask=inside)
    o = tl.sum(query[:, None] * S, 0) * scale
    if skip is not None:
        o += skipped * value
    o = o.to(y.dtype.element_ty).to(tl.float32)
    if DIVISOR_EPS is not None:
        tl.store(state + channel[:, None] * WIDTH + V, n, mask=in_key[:, None])
        o /= tl.maximum(tl.abs(tl.sum(query[:, None] * n, 0) * scale), floor) + DIVISOR_EPS
    if CENTRED:
        o = tl.where(c < V, o - tl.sum(o, 0) / V, 0.0)
    if GATE_FIRST and GATE != "none":
        o *= opened
    if NORMED:
        o *= tl.rsqrt(tl.sum(o * o, 0) / V + eps)
    if scale_of_norm is not None:
        o *= factor
    if not GATE_FIRST and GATE != "none":
        o *= opened
    tl.store(y + head * V + c, o.to(y.dtype.element_ty), mask=c < V)


@lru_cache(maxsize=1024)
def launch(
    streams: tuple[tuple[Any, ...], ...], programs: int, elements: int, how: tuple[Any, ...], *numbers: Any
) -> LaunchSpec:
    """The launch for streams of these shapes; `numbers` are the arguments between the tensors and the constants."""
    constants: dict[str, Any] = dict(zip(("Q", "KEY", "VALUE"), streams, strict=True))
    names = ["H", "REPEATS", "DECAY", "CHANNELS", "BETA", "DELTA", "STEPS", "UNIT", "TURN"]
    names += ["GATE", "GATE_FIRST", "NORMED", "CENTRED", "DIVISOR_EPS", "CAP", "LAYERS"]
    constants |= dict(zip(names, how, strict=True))
    constants |= {"LAYER_BLOCK": next_power_of_2(max(1, constants["LAYERS"])), "EPS": EPS}
    warps = max(1, min(elements // PER_WARP, MOST_WARPS))
    return LaunchSpec(advance_token, programs, *numbers, **constants, warps=warps, overlap=True)


class Decays(NamedTuple):
    """Decays and β as the kernel takes them."""

    tensors: tuple[Tensor | None, ...] = (None,) * 3  # a, A_log and dt_bias
    row: int = 0  # stride of a
    kind: str = "none"
    channels: bool = False
    lower: float = 0.0
    layer: int = 0
    layers: int = 0


def decays_of(decay: Decay) -> Decays:
    """The arguments of the kernel for decays."""
    if decay is None:
        return Decays()
    if isinstance(decay, TiedGates):
        bounds = None if decay.bounds is None else decay.bounds.contiguous()
        return Decays(
            (bounds, None, None), 0, "tied", True, layer=decay.layer, layers=0 if bounds is None else len(bounds)
        )
    if isinstance(decay, Tensor):
        if decay.dim() == 1:
            return Decays((decay.contiguous(), None, None), 0, "constant")
        a, _, row = rows_of(decay.flatten(2))
        return Decays((a, None, None), row, "given", decay.dim() == 4)
    if isinstance(decay, CappedGates):
        f, _, row = rows_of(decay.f)
        return Decays((f, None, decay.f_bias.contiguous()), row, "capped")
    decay = decay.multiplied()
    channels = decay.dt_bias.dim() == 2
    a, _, row = rows_of(decay.a.flatten(2) if channels else decay.a)
    kind = "softplus" if decay.lower_bound is None else "bounded"
    return Decays((a, decay.A_log.contiguous(), decay.dt_bias.contiguous()), row, kind, channels, decay.lower)


def strengths_of(ops: TokenOps) -> tuple[str, list[Tensor | None], tuple[int, int], float]:
    """The kind of β, the tensors b, bias and w, the strides of b and w, and the largest β."""
    beta = ops.beta
    if isinstance(ops.decay, CappedGates):
        i, _, row = rows_of(ops.decay.i)
        return "capped", [i, ops.decay.i_bias.contiguous(), None], (row, 0), 1.0
    if isinstance(ops.decay, GateInputs) and ops.decay.b is not None:
        beta = Strength(ops.decay.b, ops.decay.bias, ops.decay.largest)
    if isinstance(beta, Strength):
        b, _, row = rows_of(beta.b)
        return "sigmoid", [b, None if beta.bias is None else beta.bias.contiguous(), None], (row, 0), beta.largest
    if beta is not None:
        (b, _, b_row), (w, _, w_row) = rows_of(beta.b), rows_of(beta.w)
        return "channels", [b, None, w], (b_row, w_row), beta.largest
    return "step" if ops.step_writes else "none", [None] * 3, (0, 0), 1.0


def forward(streams: Sequence[FeatureStream], ops: TokenOps, initial_state: Tensor, consume_state: bool) -> TokenResult:
    """The results of `recurrence_token`, whose arguments these are."""
    note(WHOLE_TOKEN)
    q, _, v = streams
    B, H = len(v.x), v.x.shape[2] // ops.steps
    repeats = H // q.x.shape[2]
    histories = [own_history(stream) for stream in streams]
    # programs that share a history may not overwrite it
    following = [x if x.shape[1] == 0 or (i == 2 or repeats == 1) else new(x) for i, x in enumerate(histories)]
    state = initial_state.to(torch.float32).contiguous()
    if state is initial_state and not (consume_state and writable(state)):
        state = state.clone()
    carried = tuple(x if consume_state and writable(x) else x.contiguous().clone() for x in ops.carried)
    tensors: list[Any] = []
    about, strides = [], []
    for stream, history, later in zip(streams, histories, following, strict=True):
        x, row, _ = strided(stream.x)
        size = stream.size
        sizes = (stream.channels, stream.taps, size, next_power_of_2(size))
        about.append((*sizes, stream.activation, stream.norm, next_power_of_2(stream.taps)))
        parameters = (None if part is None else part.contiguous() for part in (stream.weight, stream.bias))
        tensors += [x, *parameters, *((history, later) if stream.taps > 1 else (None, None))]
        strides.append(row)
    decays, (beta, gates, rows, largest) = decays_of(ops.decay), strengths_of(ops)
    norm = GatedNorm(None, None, 0.0) if ops.norm is None else ops.norm
    gate, gate_row = (None, 0) if norm.gate is None else heads_of_rows(norm.gate)
    feedback = [None, None] if ops.feedback is None else [ops.feedback.rate, ops.feedback.correction]
    positions, rates, kind, amplitude, after = None, None, "none", 1.0, None
    if ops.turn is not None:
        positions, rates, amplitude = ops.turn.positions, ops.turn.rates, float(ops.turn.amplitude)
        kind, after = "doubled" if ops.turn.doubles else "pairs", new(ops.turn.positions)
    y = new(v.x, B, 1, H, v.size)
    others = (None if x is None else x.contiguous() for x in (norm.weight, ops.skip, positions, rates))
    tensors += [*decays.tensors, *gates, *(None if x is None else x.contiguous() for x in feedback), gate, *others]
    scale = state.shape[2] ** -0.5 if ops.scale is None else ops.scale
    numbers = [*strides, decays.row, *rows, gate_row, float(largest), float(scale), float(norm.eps)]
    numbers += [decays.lower, amplitude, decays.layer]
    unit = ops.feedback is not None and ops.feedback.unit
    how: list[Any] = [H, repeats, decays.kind, decays.channels, beta, ops.delta, ops.steps, unit, kind]
    how += ["none" if gate is None else norm.activation, norm.gate_first, ops.norm is not None, ops.centred]
    how += [ops.divisor_eps, ops.decay.cap if isinstance(ops.decay, CappedGates) else None, decays.layers]
    elements = next_power_of_2(state.shape[2]) * about[2][3]
    launch(tuple(about), B * H, elements, tuple(how), *numbers)(*tensors, after, *(carried or (None,)), state, y)
    return TokenResult(y, following, state, after, carried)
