"""Features in Triton: one launch forward and one backward, which saves only the arguments and is bitwise repeatable."""

import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, plain, register
from ...core.recompute import noted, remake
from ...core.recurrence import writable
from ...gpu.device import multiprocessors
from ...gpu.launch import LaunchSpec, cdiv, next_power_of_2
from ...gpu.reductions import add_parts
from ..arguments import FeatureStream
from ..composition import continued
from ..stages import EPS
from . import kernels as triton_kernels

LOAD = 256  # bytes per load of a warp, 8 per thread: with 16, too few warps have room
# warps that run side by side on a multiprocessor; in the backward pass, which loads gradients too, each has twice the
# registers. Forward there is room for 32, but runs as long as a power of two keep to the same channels of memory.
WARPS, WARPS_BACKWARD = 28, 16
REGISTERS_BACKWARD = 128  # of a thread, so that there is room for these warps: left alone, the compiler takes 163
TOKENS = 4  # per iteration
ALIGNED = 16  # channels: more would not fit into one load
SHORTEST = 16  # tokens of a run: the W − 1 before or after it are read as well
MOST_WAVES = 4  # of programs, one after the other on the same multiprocessors


class Cut(NamedTuple):
    """Partition of the work: `runs` of `length` tokens in each row, by blocks of `heads` heads of `size` channels."""

    heads: int
    size: int
    block: int  # the power of two that holds a head
    length: int
    runs: int
    programs: int
    warps: int  # per program
    tokens: int  # per iteration


@cache
def cut(
    B: int, T: int, heads: int, size: int, norm: str, channels: int, warps: int, tokens: int, beyond: int = 0
) -> Cut:
    """Cut x [B,T,heads,size] for `warps` warps of `channels` channels each that run side by side.

    A run together with the `beyond` tokens that are read after it takes a whole number of iterations of `tokens`.
    """
    C = heads * size
    if norm == "none":  # then heads do not matter
        together, size = 1, min(channels, next_power_of_2(C))
    else:
        together = max(1, min(channels // next_power_of_2(size), next_power_of_2(heads)))
    block, blocks = next_power_of_2(size), cdiv(C, together * size)
    each = max(1, together * block // channels)
    columns = max(1, B) * blocks * each  # warps of all runs that begin with the same token; a batch may be empty
    # a last wave that fills little of the device takes as long as any other
    candidates = [max(1, waves * warps // columns) for waves in range(1, MOST_WAVES + 1)]
    runs = min(candidates, key=lambda n: cdiv(n * columns, warps) * (cdiv(T, n) + SHORTEST))
    length = cdiv(max(SHORTEST, cdiv(T, runs)) + beyond, tokens) * tokens - beyond
    runs = cdiv(T, length)
    return Cut(together, size, block, length, runs, B * runs * blocks, each, tokens)


def strided(x: Tensor) -> tuple[Tensor, int, int]:
    """x [B,T,heads,size] with the channels of a token contiguous, and the strides of rows and tokens."""
    heads, size = x.shape[2:]
    _, _, head, channel = x.stride()
    if (channel != 1 and size > 1) or (head != size and heads > 1):
        x = x.contiguous()
    return x, x.stride(0), x.stride(1)


@lru_cache(maxsize=1024)
def launch(
    cut: Cut, shape: tuple[int, ...], taps: int, activation: str, norm: str, documents: int, *strides: int
) -> LaunchSpec:
    """The launch for an x of this shape, backward if there are strides of x, dy and dx: of rows and tokens of each."""
    backward, unit = len(strides) > 2, math.gcd(ALIGNED, *strides)
    numbers = (shape[1], cut.length, documents, *(stride // unit for stride in strides))
    constants: dict[str, Any] = {
        "UNIT": unit,
        "C": shape[2] * shape[3],
        "W": taps,
        "ACTIVATION": activation,
        "NORM": norm,
        "EPS": EPS,
    }
    tile: dict[str, Any] = {"HEADS": cut.heads, "SIZE": cut.size, "BLOCK": cut.block, "TOKENS": cut.tokens}
    options: dict[str, Any] = {"warps": cut.warps, "registers": REGISTERS_BACKWARD if backward else None}
    kernel = triton_kernels.backward if backward else triton_kernels.forward
    early = None if backward else shape[1] == 1  # decoding, whose launches are small
    return LaunchSpec(kernel, cut.programs, *numbers, **options, **constants, **tile, overlap=early)


def parameters(
    weight: Tensor | None, bias: Tensor | None, history: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The parameters, contiguous; a convolution of one tap has no history."""
    weight, bias = (None if p is None else p.contiguous() for p in (weight, bias))
    return weight, bias, None if history is None or not history.shape[1] else history.contiguous()


class Arguments(NamedTuple):
    x: Tensor  # [B,T,heads,size]
    weight: Tensor | None  # [C,1,W]
    bias: Tensor | None  # [C]
    history: Tensor | None  # [N,W−1,C]
    cu_seqlens: Tensor | None  # [N+1]
    activation: str
    norm: str

    @property
    def taps(self) -> int:
        return 1 if self.weight is None else self.weight.shape[2]

    @property
    def documents(self) -> int:
        return 0 if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


def run(args: Arguments, tail: Tensor | None = None) -> Tensor:
    """y, shaped as x [B,T,heads,size]; writes the last W − 1 inputs into `tail` [B,W−1,C]."""
    x, weight, bias, history, cu_seqlens, activation, norm = args
    weight, bias, history = parameters(weight, bias, history)
    x, *strides = strided(x)
    pieces = cut(*x.shape, norm, LOAD // x.element_size(), WARPS * multiprocessors(x.device), TOKENS)
    y = new(x)
    queue = launch(pieces, x.shape, args.taps, activation, norm, args.documents, *strides)
    queue(x, weight, bias, history, cu_seqlens, y, tail)
    return y


def compute(args: Arguments) -> tuple[Tensor]:
    """y, shaped as x."""
    return (run(args),)


def differentiate(args: Arguments, needed: Any, dy: Tensor, dx: Tensor | None = None) -> Gradients:
    """The gradients of all tensors but `cu_seqlens`; that of x is written to `dx`, if there is one."""
    x, weight, bias, initial_history, cu_seqlens, activation, norm = args
    weight, bias, history = parameters(weight, bias, initial_history)
    dx = new(x) if dx is None else dx
    (x, *strides), (dy, *dy_strides) = strided(x), strided(dy)
    B, C, W = x.shape[0], x.shape[2] * x.shape[3], args.taps
    room = WARPS_BACKWARD * multiprocessors(x.device)
    pieces = cut(*x.shape, norm, LOAD // x.element_size(), room, TOKENS, W - 1)
    dtaps = dhistory = None
    if weight is not None:
        dtaps = new(x, B * pieces.runs, W + (bias is not None), C, dtype=torch.float32)
    if history is not None and needed.history:
        # at most W − 1 tokens of a document read the history, fewer in short documents
        dhistory = torch.zeros(len(history), W - 1, W - 1, C, dtype=torch.float32, device=x.device)
    queue = launch(pieces, x.shape, W, activation, norm, args.documents, *strides, *dy_strides, *dx.stride()[:2])
    queue(x, weight, bias, history, cu_seqlens, dy, dx, dtaps, dhistory)
    dweight = dbias = None
    if weight is not None and dtaps is not None:
        total = add_parts(dtaps, weight.dtype if bias is None else torch.float32)
        # copies if there is a bias, whose gradients lie between those of the taps
        dweight = total[:, None, :W].to(weight.dtype).contiguous()
        dbias = None if bias is None else total[:, W].to(bias.dtype, copy=True)
    past = None
    if initial_history is not None:
        past = torch.zeros_like(initial_history) if dhistory is None else dhistory.sum(1).to(initial_history.dtype)
    return {"x": dx, "weight": dweight, "bias": dbias, "history": past}


features = register("features", compute, differentiate, lambda args: (new(args.x),))


def _empty_tail(args: Arguments) -> Tensor:
    x, dtype = args.x, None if args.history is None else args.history.dtype
    return new(x, x.shape[0], args.taps - 1, x.shape[2] * x.shape[3], dtype=dtype)


def compute_step(args: Arguments) -> tuple[Tensor, Tensor]:
    """y, and the last W − 1 inputs [B,W−1,C] in the same launch; without documents, and for a weight."""
    tail = _empty_tail(args)
    return run(args, tail), tail


step = register("features_step", compute_step, None, lambda args: (new(args.x), _empty_tail(args)), results=2)


def arguments(stream: FeatureStream) -> Arguments:
    """The arguments of the op."""
    x, weight, bias = stream.x, stream.weight, stream.bias
    cu_seqlens = None if stream.cu_seqlens is None else stream.cu_seqlens.contiguous()
    return Arguments(x, weight, bias, stream.history, cu_seqlens, stream.activation, stream.norm)


def recomputed(y: Tensor, args: Arguments, kept: bool | None) -> Tensor:
    """y, noted as a result that is recomputed in the backward pass, unless it is to be kept.

    By default, a result is recomputed if its input is: an expansion and its features are not worth their memory.
    """
    if not (noted(args.x) if kept is None else not kept):
        return y
    return remake(y, lambda *args: run(Arguments(*args)), *args)


def forward(stream: FeatureStream) -> tuple[Tensor, Tensor | None]:
    """y [B,T,heads,size], and the history for the next call if it is to be returned."""
    if stream.is_identity:
        return stream.x, continued(stream) if stream.return_history else None
    args = arguments(stream)
    if stream.return_history and stream.weight is not None and stream.cu_seqlens is None and not stream.differentiated:
        past = stream.history
        if stream.consume_history and stream.x.shape[1] == 1 and past is not None and writable(past) and plain(args):
            return run(args, past), past
        return step(*args)
    y = recomputed(features(*args), args, stream.kept)
    return y, continued(stream) if stream.return_history else None
