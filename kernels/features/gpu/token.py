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
from ...core.autograd import NAMESPACE, plain
from ...core.deterministic import is_deterministic
from ...delta_gates import GateInputs
from ...delta_gates.gpu.op import Arguments as Gates
from ...delta_gates.gpu.op import gates_forward, tile
from ...delta_gates.gpu.op import strided as gate_arguments
from ...gpu.launch import LaunchSpec, cdiv
from ..arguments import FeatureStream
from ..stages import EPS
from .kernels import activate, bias_of, channels, convolve, normalise, taps_of
from .op import LOAD, Cut, cut, parameters, strided

MOST = 3  # streams of a launch
GATE_TILE = 128  # of a program: as many warps share them as the streams need, which may be one


@triton.jit
def token(
    x,  # [B,C], with any stride of rows
    weight,  # [C,1,W]
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
    taps = taps_of(weight, c, inside, W)
    window = ()
    for j in tl.static_range(W - 1):
        past = tl.load(history + (row * (W - 1) + j) * C + c, mask=inside, other=0.0)
        window = window + (past.to(tl.float32),)
    window = window + (tl.load(x + row * x_batch + c, mask=inside, other=0.0).to(tl.float32),)
    z = convolve(window, taps, bias_of(bias, c, inside, HEADS, BLOCK), W)
    a = activate(z, inside, ACTIVATION, NORM)
    tl.store(y + row * C + c, normalise(a, NORM, EPS).to(y.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # other threads may still have to read what is written next
    for j in tl.static_range(W - 1):
        tl.store(history + (row * (W - 1) + j) * C + c, window[j + 1].to(history.dtype.element_ty), mask=inside)


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
    STREAM0: tl.constexpr,
    STREAM1: tl.constexpr,
    STREAM2: tl.constexpr,
    GATES: tl.constexpr,  # M, ROWS, BLOCK
    EPS: tl.constexpr,
):
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
        ROWS: tl.constexpr = GATES[1]
        BLOCK: tl.constexpr = GATES[2]
        gates_forward(a, A_log, dt_bias, b, bias, log_decay, beta, rows, a_row, b_row, largest, first3, M, ROWS, BLOCK)


@lru_cache(maxsize=1024)
def launch(
    pieces: tuple[Cut, ...],
    streams: tuple[tuple[int | str, ...], ...],
    strides: tuple[int, ...],
    sizes: tuple[int, int, int],
    gates: tuple[Any, ...],
) -> LaunchSpec:
    """The launch for streams of these shapes, and for gates of these sizes, rows, strides and largest β."""
    programs = [piece.programs for piece in pieces]
    first = [programs[0], programs[0] + programs[1], sum(programs)]
    third = streams[2] if len(streams) == MOST else streams[1]
    numbers = (*first, *strides, *[0] * (MOST - len(strides)), *gates)
    about: dict[str, Any] = {"STREAM0": streams[0], "STREAM1": streams[1], "STREAM2": third, "GATES": sizes}
    count = first[2] + cdiv(gates[0], sizes[1])
    return LaunchSpec(tokens, count, *numbers, EPS=EPS, warps=max(piece.warps for piece in pieces), **about)


def compute(
    tensors: Sequence[Tensor | None],
    histories: Sequence[Tensor],
    gates: Sequence[Tensor | None],
    activations: str,
    norms: str,
    largest: float,
) -> tuple[Tensor, Tensor]:
    """All y [B,1,heads,size] one after the other, and both gates [2,…,M]. (Lists of results cannot be compiled.)

    Args:
        tensors: Of each stream x, taps and bias.
        histories: The last W − 1 inputs [B,W−1,C] of each stream, contiguous, which become those of the next token.
        gates: The tensors of `GateInputs`; none for no gates.
        activations: Of all streams, with spaces between.
        norms: The same.
        largest: That of `GateInputs`.
    """
    y, both = empty(tensors, histories, gates, activations, norms, largest)
    kernel_args: list[Any] = []
    pieces, about, strides = [], [], []
    streams = zip(tensors[::3], tensors[1::3], tensors[2::3], activations.split(), norms.split(), strict=True)
    for i, (part, (x, weight, bias, activation, norm)) in enumerate(zip(each(y, tensors), streams, strict=True)):
        assert x is not None
        weight, bias, _ = parameters(weight, bias, None)
        assert weight is not None
        x, batch, _ = strided(x)
        piece = cut(*x.shape, norm, LOAD // x.element_size(), warps=1, tokens=1)
        kernel_args += [x, weight, bias, histories[i], part]
        pieces.append(piece)
        about.append((weight.shape[0], weight.shape[2], piece.heads, piece.size, piece.block, activation, norm))
        strides.append(batch)
    kernel_args += [None] * (5 * MOST - len(kernel_args))
    if gates:
        inputs: list[Any] = [*gates, largest]
        read, numbers = gate_arguments(Gates(*inputs))
        M, _, BLOCK = tile(inputs[0].shape[-1]).values()
        kernel_args += [*read, *both]
        sizes = M, max(1, GATE_TILE // BLOCK), BLOCK
    else:
        kernel_args += [None] * 7
        sizes, numbers = (1, 1, 1), (0, 0, 0, largest)
    launch(tuple(pieces), tuple(about), tuple(strides), sizes, numbers)(*kernel_args)
    return y, both


def each(joined: Tensor, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """y of each stream in the first result of `compute`."""
    streams = [x for x in tensors[::3] if x is not None]
    parts = joined.split([x.numel() for x in streams])
    return [part.view(x.shape) for part, x in zip(parts, streams, strict=True)]


def empty(tensors: Sequence[Tensor | None], histories: Any, gates: Sequence[Any], *rest: Any) -> tuple[Tensor, Tensor]:
    """Uninitialised results of `compute`."""
    x, count = tensors[0], sum(x.numel() for x in tensors[::3] if x is not None)
    assert x is not None
    return new(x, count), new(x, 2, *(gates[0].shape if gates else (0,)), dtype=torch.float32)


_op = torch.library.custom_op(f"{NAMESPACE}::features_token", compute, mutates_args=["histories"])
_op.register_fake(empty)


def fits(streams: Sequence[FeatureStream], gates: GateInputs | None = None) -> bool:
    """Return whether one launch serves all: a token of a few streams of a dtype, no gradients, histories to return.

    In deterministic mode a token takes the kernels of longer sequences.
    """
    if is_deterministic():
        return False
    if gates is not None and (gates.differentiated or gates.a.dtype == torch.float64):
        return False
    return 1 < len(streams) <= MOST and all(
        stream.x.shape[1] == 1
        and stream.weight is not None
        and stream.return_history
        and stream.cu_seqlens is None
        and not stream.differentiated
        and stream.x.dtype == streams[0].x.dtype
        for stream in streams
    )


def own_history(stream: FeatureStream) -> Tensor:
    """A contiguous history to overwrite: the given one if `consume_history` allows it, or else a copy."""
    if stream.history is None:
        return stream.x.new_zeros(stream.sequences, stream.taps - 1, stream.channels)
    first = stream.history.contiguous()
    return first.clone() if first is stream.history and not stream.consume_history else first


def forward(
    streams: Sequence[FeatureStream], gates: GateInputs | None = None
) -> tuple[list[tuple[Tensor, Tensor | None]], Tensor | None]:
    """y and the history for the next call of each stream, and both gates [2,…,M] if `gates` has their inputs."""
    tensors = [x for stream in streams for x in (stream.x, stream.weight, stream.bias)]
    histories = [own_history(stream) for stream in streams]
    inputs = [] if gates is None else [x if x is None or x.dim() > 1 else x.contiguous() for x in gates.tensors]
    how = " ".join(stream.activation for stream in streams), " ".join(stream.norm for stream in streams)
    run = compute if plain([*tensors, *histories, *inputs]) else _op
    y, both = run(tensors, histories, inputs, *how, 1.0 if gates is None else gates.largest)
    return [*zip(each(y, tensors), histories, strict=True)], None if gates is None else both
