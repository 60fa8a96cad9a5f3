"""One token of two or three streams in one launch, as in decoding. It has no gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import op
from ..allocation import new
from ..triton.enqueue import Prepared
from ..triton.launches import multiprocessors
from .arguments import FeatureStream
from .stages import EPS
from .triton_kernels import activate, channels, convolve, normalise, taps_of
from .triton_op import LOAD, WARPS, Cut, cut, parameters, strided

MOST = 3  # streams of a launch


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
    added = tl.zeros([HEADS, BLOCK], tl.float32)
    if bias is not None:
        added = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    taps = taps_of(weight, c, inside, W)
    window = ()
    for j in tl.static_range(W - 1):
        past = tl.load(history + (row * (W - 1) + j) * C + c, mask=inside, other=0.0)
        window = window + (past.to(tl.float32),)
    window = window + (tl.load(x + row * x_batch + c, mask=inside, other=0.0).to(tl.float32),)
    a = activate(convolve(window, taps, added, W), ACTIVATION)
    if ACTIVATION == "elu1" and NORM != "none":
        a = tl.where(inside, a, 0.0)
    tl.store(y + row * C + c, normalise(a, NORM, EPS).to(y.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # other threads may still have to read what is written next
    for j in tl.static_range(W - 1):
        tl.store(history + (row * (W - 1) + j) * C + c, window[j + 1].to(history.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first1", "first2"])
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
    first1,  # program of the second stream
    first2,
    batch0,
    batch1,
    batch2,
    STREAM0: tl.constexpr,
    STREAM1: tl.constexpr,
    STREAM2: tl.constexpr,
    EPS: tl.constexpr,
):
    p = tl.program_id(0)
    if p < first1:
        token(x0, weight0, bias0, history0, y0, p, batch0, STREAM0, EPS)
    elif p < first2:
        token(x1, weight1, bias1, history1, y1, p - first1, batch1, STREAM1, EPS)
    elif x2 is not None:
        token(x2, weight2, bias2, history2, y2, p - first2, batch2, STREAM2, EPS)


@lru_cache(maxsize=1024)
def launch(pieces: tuple[Cut, ...], streams: tuple[tuple[int | str, ...], ...], strides: tuple[int, ...]) -> Prepared:
    """The launch for streams of these shapes."""
    programs = [piece.programs for piece in pieces]
    first = [programs[0], programs[0] + programs[1]]
    third = streams[2] if len(streams) == MOST else streams[1]
    numbers = (*first, *strides, *[0] * (MOST - len(strides)))
    warps = max(piece.warps for piece in pieces)
    about = {"STREAM0": streams[0], "STREAM1": streams[1], "STREAM2": third}
    return Prepared(tokens, (sum(programs),), *numbers, EPS=EPS, num_warps=warps, **about)  # type: ignore[arg-type]


def compute(tensors: Sequence[Tensor | None], histories: Sequence[Tensor], activations: str, norms: str) -> Tensor:
    """All y [B,1,heads,size] one after the other (a list cannot be compiled); histories become those of the next token.

    Args:
        tensors: Of each stream x, taps and bias.
        histories: The last W − 1 inputs [B,W−1,C] of each stream, contiguous.
        activations: Of all streams, with spaces between.
        norms: The same.
    """
    given: list[Tensor | None] = []
    pieces: list[Cut] = []
    about, strides = [], []
    found = fake(tensors, histories, activations, norms)
    parts = each(found, tensors)
    for i, (activation, norm) in enumerate(zip(activations.split(), norms.split(), strict=True)):
        x, weight, bias = tensors[3 * i : 3 * i + 3]
        weight, bias, _ = parameters(weight, bias, None)
        assert x is not None
        assert weight is not None
        x, batch, _ = strided(x)
        C, _, W = weight.shape
        piece = cut(*x.shape, norm, LOAD // x.element_size(), WARPS * multiprocessors(x.device))
        given += [x, weight, bias, histories[i], parts[i]]
        pieces.append(piece)
        about.append((C, W, piece.heads, piece.size, piece.block, activation, norm))
        strides.append(batch)
    given += [None] * (5 * MOST - len(given))
    launch(tuple(pieces), tuple(about), tuple(strides))(*given)  # type: ignore[arg-type]
    return found


def each(found: Tensor, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """y of each stream in the result of `compute`."""
    streams = [x for x in tensors[::3] if x is not None]
    parts = found.split([x.numel() for x in streams])
    return [part.view(x.shape) for part, x in zip(parts, streams, strict=True)]


def fake(tensors: Sequence[Tensor | None], histories: Sequence[Tensor], activations: str, norms: str) -> Tensor:
    """An empty tensor of the shape and dtype that `compute` returns."""
    streams = [x for x in tensors[::3] if x is not None]
    return new(streams[0], sum(x.numel() for x in streams))


_op = torch.library.custom_op(f"{op.NAMESPACE}::features_token", compute, mutates_args=["histories"])
_op.register_fake(fake)


def fits(streams: Sequence[FeatureStream]) -> bool:
    """Whether one launch can serve them all: one token of a few streams, with no gradients and a history to return."""
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


def forward(streams: Sequence[FeatureStream]) -> list[tuple[Tensor, Tensor | None]]:
    """y and the history for the next call of each stream."""
    tensors = [x for stream in streams for x in (stream.x, stream.weight, stream.bias)]
    histories = [own_history(stream) for stream in streams]
    how = " ".join(stream.activation for stream in streams), " ".join(stream.norm for stream in streams)
    found = (compute if op.plain([*tensors, *histories]) else _op)(tensors, histories, *how)
    return [*zip(each(found, tensors), histories, strict=True)]
