"""One token of two or three streams, and of the delta rule's gates, in one launch, as in decoding. No gradients."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autocast import autocast_dtype
from ...core.autograd import NAMESPACE, plain
from ...core.deterministic import is_deterministic
from ...delta_gates import GateInputs
from ...delta_gates.gpu.op import Arguments as Gates
from ...delta_gates.gpu.op import decay_of, gates_forward, tile
from ...delta_gates.gpu.op import strided as gate_arguments
from ...gpu.launch import LaunchSpec, cdiv, next_power_of_2
from ...gpu.overlap import wait
from ...gpu.rows import load, rows_of
from ..arguments import FeatureStream
from ..stages import EPS
from .kernels import activate, bias_of, channels, convolve, normalise, taps_of
from .op import LOAD, Cut, cut, parameters, strided

MOST = 3  # streams of a launch
GATE_TILE = 128  # gates of a program: as many warps share them as the streams need, which may be one
WEIGHT_TILE = 2048  # numbers of the gates' weight that a program reads, and the longest row of it


@triton.jit
def token(
    x,  # [B,C], with any stride of rows
    weight,  # [C,1,W], or None
    bias,  # [C]
    history,  # [B,W−1,C], which becomes that of the next token
    y,  # [B,C]
    program,
    x_batch,
    STREAM: tl.constexpr,  # C, W, HEADS, SIZE, BLOCK, ACTIVATION, NORM
    EPS: tl.constexpr,
):
    C: tl.constexpr = STREAM[0]
    W: tl.constexpr = STREAM[1]
    HEADS: tl.constexpr = STREAM[2]
    SIZE: tl.constexpr = STREAM[3]
    BLOCK: tl.constexpr = STREAM[4]
    ACTIVATION: tl.constexpr = STREAM[5]
    NORM: tl.constexpr = STREAM[6]
    BLOCKS: tl.constexpr = (C + HEADS * SIZE - 1) // (HEADS * SIZE)
    c, inside = channels(program % BLOCKS, C, HEADS, SIZE, BLOCK)
    row = (program // BLOCKS).to(tl.int64)
    window = ()
    for j in tl.static_range(W - 1):
        past = tl.load(history + (row * (W - 1) + j) * C + c, mask=inside, other=0.0)
        window = window + (past.to(tl.float32),)
    window = window + (tl.load(x + row * x_batch + c, mask=inside, other=0.0).to(tl.float32),)
    if weight is not None:
        z = convolve(window, taps_of(weight, c, inside, W), bias_of(bias, c, inside, HEADS, BLOCK), W)
    else:
        z = window[W - 1]
    a = activate(z, inside, ACTIVATION, NORM)
    tl.store(y + row * C + c, normalise(a, NORM, EPS).to(y.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # other threads may still have to read what is written next
    for j in tl.static_range(W - 1):
        tl.store(history + (row * (W - 1) + j) * C + c, window[j + 1].to(history.dtype.element_ty), mask=inside)


@triton.jit
def low_rank_gates(
    f,
    up,  # [M,RANK]
    A_log,
    dt_bias,
    b,
    bias,
    log_decay,
    beta,
    program,
    f_row,
    b_row,
    largest,
    lower,
    M: tl.constexpr,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,  # decays of a program
    HEAD_BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Some decays of a token, of inputs that a few numbers are widened into; the first program also computes β."""
    BLOCKS: tl.constexpr = (M + CHANNELS - 1) // CHANNELS
    row, c = (program // BLOCKS).to(tl.int64), program % BLOCKS * CHANNELS + tl.arange(0, CHANNELS)
    r = tl.arange(0, RANK_BLOCK)
    inside = (c < M)[:, None] & (r < RANK)[None, :]
    weight = load(up, c[:, None].to(tl.int64) * RANK + r[None, :], inside)
    a = tl.sum(weight * load(f, row * f_row + r, r < RANK)[None, :], 1)
    a = a.to(f.dtype.element_ty).to(tl.float32)  # rounded as on the path for many rows
    x, rate = a + load(dt_bias, c, c < M), tl.exp(load(A_log, c // SIZE, c < M))
    tl.store(log_decay + row * M + c, decay_of(x, rate, lower, BOUNDED), mask=c < M)
    if program % BLOCKS == 0:
        h = tl.arange(0, HEAD_BLOCK)
        raw = load(b, row * b_row + h, h < M // SIZE)
        if bias is not None:
            raw += load(bias, h, h < M // SIZE)
        tl.store(beta + row * (M // SIZE) + h, largest * tl.sigmoid(raw), mask=h < M // SIZE)


@triton.jit(do_not_specialize=["first1", "first2", "first3", "rows"])
def tokens(
    x0,
    weight0,
    bias0,
    history0,
    y0,
    x1,
    weight1,
    bias1,
    history1,
    y1,
    x2,  # None if there are two streams
    weight2,
    bias2,
    history2,
    y2,
    a,  # None without gates
    A_log,
    dt_bias,
    b,
    bias,
    up,  # None if a has the inputs of the decays
    log_decay,
    beta,
    first1,  # program of the second stream
    first2,
    first3,  # and of the gates
    batch0,
    batch1,
    batch2,
    rows,
    a_row,
    b_row,
    largest,
    lower,  # bound of the log decays if they are bounded
    STREAM0: tl.constexpr,
    STREAM1: tl.constexpr,
    STREAM2: tl.constexpr,
    GATES: tl.constexpr,  # M, SIZE, ROWS, BLOCK, HEAD_BLOCK, RANK, RANK_BLOCK, BOUNDED
    EPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    p = tl.program_id(0)
    if p < first1:
        token(x0, weight0, bias0, history0, y0, p, batch0, STREAM0, EPS)
    elif p < first2:
        token(x1, weight1, bias1, history1, y1, p - first1, batch1, STREAM1, EPS)
    elif p < first3:
        if x2 is not None:
            token(x2, weight2, bias2, history2, y2, p - first2, batch2, STREAM2, EPS)
    elif a is not None:
        M: tl.constexpr = GATES[0]
        SIZE: tl.constexpr = GATES[1]
        ROWS: tl.constexpr = GATES[2]
        BLOCK: tl.constexpr = GATES[3]
        HEADS: tl.constexpr = GATES[4]
        RANK: tl.constexpr = GATES[5]
        RANKS: tl.constexpr = GATES[6]
        BOUNDED: tl.constexpr = GATES[7]
        if up is None:
            gates_forward(
                *(a, A_log, dt_bias, b, bias, log_decay, beta),
                *(rows, a_row, b_row, largest, lower, first3),
                *(M, SIZE, ROWS, BLOCK, HEADS, BOUNDED),
            )
        else:
            low_rank_gates(
                *(a, up, A_log, dt_bias, b, bias, log_decay, beta),
                *(p - first3, a_row, b_row, largest, lower),
                *(M, SIZE, BLOCK, HEADS, RANK, RANKS, BOUNDED),
            )


@lru_cache(maxsize=1024)
def launch(
    pieces: tuple[Cut, ...],
    streams: tuple[tuple[int | str, ...], ...],
    strides: tuple[int, ...],
    sizes: tuple[int, ...],
    gates: tuple[Any, ...],
) -> LaunchSpec:
    """The launch for streams of these shapes, and for gates of these sizes, rows, strides and largest β."""
    programs = [piece.programs for piece in pieces]
    first = [programs[0], programs[0] + programs[1], sum(programs)]
    third = streams[2] if len(streams) == MOST else streams[1]
    numbers = (*first, *strides, *[0] * (MOST - len(strides)), *gates)
    about: dict[str, Any] = {"STREAM0": streams[0], "STREAM1": streams[1], "STREAM2": third, "GATES": sizes}
    M, _, rows, block, _, rank, *_ = sizes
    count = first[2] + (gates[0] * cdiv(M, block) if rank else cdiv(gates[0], rows))
    return LaunchSpec(
        tokens, count, *numbers, EPS=EPS, warps=max(piece.warps for piece in pieces), overlap=True, **about
    )


def compute(
    tensors: Sequence[Tensor | None],
    histories: Sequence[Tensor],
    gates: Sequence[Tensor | None],
    activations: str,
    norms: str,
    largest: float,
    lower: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """All y [B,1,heads,size] one after the other, and both gates. (Lists of results cannot be compiled.)

    Args:
        tensors: Of each stream x, taps and bias.
        histories: The last W − 1 inputs [B,W−1,C] of each stream, contiguous, which become those of the next token.
        gates: The tensors of `GateInputs`, with b; none for no gates.
        activations: Of all streams, with spaces between.
        norms: The same.
        largest: That of `GateInputs`.
        lower: The same.
    """
    y, log_decay, beta = empty(tensors, histories, gates, activations, norms, largest)
    kernel_args: list[Any] = []
    pieces, about, strides = [], [], []
    streams = zip(tensors[::3], tensors[1::3], tensors[2::3], activations.split(), norms.split(), strict=True)
    for i, (part, (x, weight, bias, activation, norm)) in enumerate(zip(each(y, tensors), streams, strict=True)):
        assert x is not None
        weight, bias, _ = parameters(weight, bias, None)
        x, batch, _ = strided(x)
        piece = cut(*x.shape, norm, LOAD // x.element_size(), warps=1, tokens=1)
        kernel_args += [x, weight, bias, histories[i], part]
        pieces.append(piece)
        taps = 1 if weight is None else weight.shape[2]
        about.append((x.shape[2] * x.shape[3], taps, piece.heads, piece.size, piece.block, activation, norm))
        strides.append(batch)
    kernel_args += [None] * (5 * MOST - len(kernel_args))
    if gates:
        tensors_of_gates: list[Any] = [*gates]
        sizes, read, numbers = of_gates(
            GateInputs(*tensors_of_gates[:5], largest=largest, up=tensors_of_gates[5], lower_bound=lower or None)
        )
        kernel_args += [*read, log_decay, beta]
    else:
        kernel_args += [None] * 8
        sizes, numbers = (1, 1, 1, 1, 1, 0, 1, False), (0, 0, 0, largest, lower)
    launch(tuple(pieces), tuple(about), tuple(strides), sizes, numbers)(*kernel_args)
    return y, log_decay, beta


def of_gates(gates: GateInputs) -> tuple[tuple[int, ...], list[Tensor | None], tuple[Any, ...]]:
    """The sizes, the tensors, and the numbers of a launch with gates."""
    M, size, rows, block, heads = tile(gates.dt_bias, GATE_TILE).values()
    bounded = gates.lower != 0
    if gates.up is None:
        read, numbers = gate_arguments(Gates(*gates.tensors[:-1], gates.largest, gates.lower))
        return (M, size, rows, block, heads, 0, 1, bounded), [*read, None], numbers
    (a, count, a_row), (b, _, b_row) = rows_of(gates.a), (None, 0, 0) if gates.b is None else rows_of(gates.b)
    rank = gates.a.shape[-1]
    rank_block = next_power_of_2(rank)
    channels = max(1, min(block, WEIGHT_TILE // rank_block))
    read = (a, gates.A_log, gates.dt_bias, b, gates.bias)
    sizes = (M, size, 1, channels, heads, rank, rank_block, bounded)
    return sizes, [*read, gates.up], (count, a_row, b_row, gates.largest, gates.lower)


def each(joined: Tensor, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """y of each stream in the first result of `compute`."""
    streams = [x for x in tensors[::3] if x is not None]
    parts = joined.split([x.numel() for x in streams])
    return [part.view(x.shape) for part, x in zip(parts, streams, strict=True)]


def empty(
    tensors: Sequence[Tensor | None], histories: Any, gates: Sequence[Any], *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised results of `compute`."""
    x, count = tensors[0], sum(x.numel() for x in tensors[::3] if x is not None)
    assert x is not None
    shapes = [[0], [0]]
    if gates:
        a, _, dt_bias, b, *_, up = gates
        shapes = [list(a.shape) if up is None else [*a.shape[:-1], *dt_bias.shape], list(b.shape)]
    log_decay, beta = (new(x, *shape, dtype=torch.float32) for shape in shapes)
    return new(x, count), log_decay, beta


_op = torch.library.custom_op(f"{NAMESPACE}::features_token", compute, mutates_args=["histories"])
_op.register_fake(empty)


def fits(streams: Sequence[FeatureStream], gates: GateInputs | None = None) -> bool:
    """Return whether one launch serves all: a token of a few streams of a dtype, no gradients, histories to return.

    In deterministic mode a token takes the kernels of longer sequences.
    """
    if is_deterministic():
        return False
    if gates is not None and (gates.differentiated or gates.a.dtype == torch.float64 or gates.b is None):
        return False
    return 1 < len(streams) <= MOST and all(
        stream.x.shape[1] == 1
        and not stream.is_identity
        and stream.return_history
        and stream.cu_seqlens is None
        and not stream.differentiated
        and stream.x.dtype == streams[0].x.dtype
        for stream in streams
    )


def multiplies(gates: GateInputs) -> bool:
    """Return whether the launch also computes the product with `up`."""
    up, a = gates.up, gates.a
    return up is not None and up.dtype == a.dtype and up.shape[1] <= WEIGHT_TILE and autocast_dtype(a.device) is None


def own_history(stream: FeatureStream) -> Tensor:
    """A contiguous history to overwrite: the given one if `consume_history` allows it, or else a copy."""
    if stream.history is None:
        return stream.x.new_zeros(stream.sequences, stream.taps - 1, stream.channels)
    first = stream.history.contiguous()
    return first.clone() if first is stream.history and not stream.consume_history else first


def forward(
    streams: Sequence[FeatureStream], gates: GateInputs | None = None
) -> tuple[list[tuple[Tensor, Tensor | None]], tuple[Tensor, Tensor] | None]:
    """y and the history for the next call of each stream, and both gates if `gates` has their inputs."""
    tensors = [x for stream in streams for x in (stream.x, stream.weight, stream.bias)]
    histories = [own_history(stream) for stream in streams]
    inputs: list[Tensor | None] = []
    if gates is not None:
        a, A_log, dt_bias, b, *rest = (gates if multiplies(gates) else gates.multiplied()).tensors
        inputs = [
            a,
            A_log.contiguous(),
            dt_bias.contiguous(),
            b,
            *(None if x is None else x.contiguous() for x in rest),
        ]
    how = " ".join(stream.activation for stream in streams), " ".join(stream.norm for stream in streams)
    run = compute if plain([*tensors, *histories, *inputs]) else _op
    numbers = (1.0, 0.0) if gates is None else (gates.largest, gates.lower)
    y, log_decay, beta = run(tensors, histories, inputs, *how, *numbers)
    return [*zip(each(y, tensors), histories, strict=True)], None if gates is None else (log_decay, beta)
