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
    history,  # [B,W−1,C]
    y,  # [B,C]
    tail,  # [B,W−1,C]
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
        past = tl.zeros([HEADS, BLOCK], tl.float32)
        if history is not None:
            past = tl.load(history + (row * (W - 1) + j) * C + c, mask=inside, other=0.0).to(tl.float32)
        window = window + (past,)
    window = window + (tl.load(x + row * x_batch + c, mask=inside, other=0.0).to(tl.float32),)
    a = activate(convolve(window, taps, added, W), ACTIVATION)
    if ACTIVATION == "elu1" and NORM != "none":
        a = tl.where(inside, a, 0.0)
    tl.store(y + row * C + c, normalise(a, NORM, EPS).to(y.dtype.element_ty), mask=inside)
    for j in tl.static_range(W - 1):
        tl.store(tail + (row * (W - 1) + j) * C + c, window[j + 1].to(tail.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first1", "first2"])
def tokens(
    x0,
    weight0,
    bias0,
    history0,
    y0,
    tail0,
    x1,
    weight1,
    bias1,
    history1,
    y1,
    tail1,
    x2,  # None if there are two streams
    weight2,
    bias2,
    history2,
    y2,
    tail2,
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
        token(x0, weight0, bias0, history0, y0, tail0, p, batch0, STREAM0, EPS)
    elif p < first2:
        token(x1, weight1, bias1, history1, y1, tail1, p - first1, batch1, STREAM1, EPS)
    elif x2 is not None:
        token(x2, weight2, bias2, history2, y2, tail2, p - first2, batch2, STREAM2, EPS)


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


def compute(tensors: Sequence[Tensor | None], activations: str, norms: str) -> list[Tensor]:
    """y [B,1,heads,size] and the last W − 1 inputs [B,W−1,C] of each stream.

    Args:
        tensors: Of each stream x, taps, bias and history.
        activations: Of all streams, with spaces between.
        norms: The same.
    """
    given: list[Tensor | None] = []
    results: list[Tensor] = []
    pieces: list[Cut] = []
    about, strides = [], []
    for i, (activation, norm) in enumerate(zip(activations.split(), norms.split(), strict=True)):
        x, *rest = tensors[4 * i : 4 * i + 4]
        weight, bias, history = parameters(*rest)
        assert x is not None
        assert weight is not None
        x, batch, _ = strided(x)
        C, _, W = weight.shape
        piece = cut(*x.shape, norm, LOAD // x.element_size(), WARPS * multiprocessors(x.device))
        y, tail = new(x), new(x, x.shape[0], W - 1, C, dtype=x.dtype if history is None else history.dtype)
        given += [x, weight, bias, history, y, tail]
        results += [y, tail]
        pieces.append(piece)
        about.append((C, W, piece.heads, piece.size, piece.block, activation, norm))
        strides.append(batch)
    given += [None] * (6 * MOST - len(given))
    launch(tuple(pieces), tuple(about), tuple(strides))(*given)  # type: ignore[arg-type]
    return results


def fake(tensors: Sequence[Tensor | None], activations: str, norms: str) -> list[Tensor]:
    """Empty tensors of the shapes and dtypes that `compute` returns."""
    results = []
    for i in range(0, len(tensors), 4):
        x, weight, _, history = tensors[i : i + 4]
        assert x is not None
        assert weight is not None
        C, _, W = weight.shape
        dtype = x.dtype if history is None else history.dtype
        results += [x.new_empty(x.shape), x.new_empty(x.shape[0], W - 1, C, dtype=dtype)]
    return results


_op = torch.library.custom_op(f"{op.NAMESPACE}::features_token", compute, mutates_args=())
_op.register_fake(fake)


def fits(streams: Sequence[FeatureStream]) -> bool:
    """Whether one launch can serve them all: one token of a few streams, with no gradients and a history to return."""
    return 1 < len(streams) <= MOST and all(
        stream.x.shape[1] == 1
        and stream.weight is not None
        and stream.return_history
        and stream.cu_seqlens is None
        and not stream.differentiated
        for stream in streams
    )


def forward(streams: Sequence[FeatureStream]) -> list[tuple[Tensor, Tensor | None]]:
    """y and the history for the next call of each stream."""
    tensors = [x for stream in streams for x in (stream.x, stream.weight, stream.bias, stream.history)]
    how = " ".join(stream.activation for stream in streams), " ".join(stream.norm for stream in streams)
    found = (compute if op.plain(tensors) else _op)(tensors, *how)
    return [(found[i], found[i + 1]) for i in range(0, len(found), 2)]
