"""Features of an expanded stream: product, convolution, activation and norm in one launch (Hopper, bf16).

The gradient of the product is computed in another launch, from the arguments alone, or with a norm (whose gradient
would need sums over channels there) from the product. Two batched products make of it the gradients of the stream and
the matrix.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import CONSTANT_STRIDES, OTHER_STRIDES, aligned, new
from ...core.autograd import Gradients, register
from ...core.deterministic import is_deterministic
from ...core.recompute import remake
from ...gpu.device import multiprocessors, runs_gluon
from ...gpu.launch import LaunchSpec, cdiv
from ...gpu.reductions import add_parts
from ...head_linear import Arguments as Product
from ...head_linear import compute as multiply
from ...head_linear import differentiate as differentiate_product
from ..arguments import FeatureStream
from ..stages import EPS
from .op import Arguments as Features
from .op import differentiate as differentiate_features
from .op import strided

SIZE, TAPS = 128, 4  # what the kernels are written for: channels of a head before and after, inputs of the convolution
ACTIVATIONS, NORMS = ("identity", "silu"), ("none", "l2")
WARPS = 8
MOST_WAVES = 8  # of programs


class Launch(NamedTuple):
    """Launch configuration of a kernel."""

    tokens: int  # of a tile
    registers: int  # of a thread
    programs: int  # side by side on a multiprocessor


FORWARD, BACKWARD = Launch(64, 80, 3), Launch(64, 128, 2)


def fits(stream: FeatureStream) -> bool:
    """Return whether the kernels can take the arguments, on this device.

    Not in deterministic mode: with a state or with documents, other kernels make the product.
    """
    if is_deterministic():
        return False
    x, product, weight = stream.x, stream.product, stream.weight
    return (
        product is not None
        and weight is not None
        and (x.shape[3], stream.size, stream.taps) == (SIZE, SIZE, TAPS)
        and stream.activation in ACTIVATIONS
        and stream.norm in NORMS
        and all(unsupported is None for unsupported in (stream.bias, stream.history, stream.cu_seqlens))
        and not stream.return_history
        and x.shape[1] >= FORWARD.tokens
        and x.dtype == torch.bfloat16
        and runs_gluon(x.device)
    )


@lru_cache(maxsize=256)
def cut(tiles: int, columns: int, room: int) -> tuple[int, int]:
    """Into how many runs to cut the tiles of a sequence, and how many tiles each has.

    A program costs one tile more, for its matrix; a last wave that fills little of the device takes as long as any.
    """
    candidates = {cdiv(tiles, cdiv(tiles, max(1, waves * room // columns))) for waves in range(1, MOST_WAVES + 1)}
    runs = min(candidates, key=lambda n: (cdiv(n * columns, room) * (cdiv(tiles, n) + 1), n))
    return runs, cdiv(tiles, runs)


@lru_cache(maxsize=256)
def launch(
    backward: bool,
    shape: tuple[int, ...],
    subheads: int,
    activation: str,
    norm: str,
    multiprocessors: int,
    batch_stride: int,
    token_stride: int,
) -> tuple[LaunchSpec, int]:
    """The launch for an x of this shape and these strides, and the number of its runs in each sequence."""
    from . import expanded_kernels as gluon_expanded  # the interpreter and other devices do without Gluon

    kernel, how = (gluon_expanded.backward, BACKWARD) if backward else (gluon_expanded.forward, FORWARD)
    B, T, heads, _ = shape
    columns = heads * subheads
    tiles = cdiv(T, how.tokens - (2 if backward else 1) * (TAPS - 1))
    runs, each = cut(tiles, max(1, B) * columns, how.programs * multiprocessors)
    constants: dict[str, Any] = {} if backward else {"L2": norm == "l2", "EPS": EPS}
    constants |= {"C": columns * SIZE, "SUBHEADS": subheads, "SILU": activation == "silu", "TILE": how.tokens}
    numbers = T, each, batch_stride
    options: dict[str, Any] = {"x_token": token_stride, "warps": WARPS, "registers": how.registers}
    return LaunchSpec(kernel, B * runs * columns, *numbers, **options, **constants), runs


class Arguments(NamedTuple):
    x: Tensor  # [B,T,heads,128]
    product: Tensor  # [heads,128,subheads·128]
    weight: Tensor  # [C,1,4]
    activation: str
    norm: str


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.x, *args.x.shape[:2], args.weight.shape[0] // SIZE, SIZE),)


def compute(args: Arguments) -> tuple[Tensor]:
    """y [B,T,heads·subheads,128]."""
    (_, product, weight, _, _), (y,) = args, _empty(args)
    queue, x, _ = prepared(False, args)
    queue(x, aligned(product.to(x.dtype).contiguous()), weight.contiguous(), y)
    return (y,)


def prepared(backward: bool, args: Arguments) -> tuple[LaunchSpec, Tensor, int]:
    """The launch of a call, its x, and the number of runs in each sequence."""
    x, *strides = strided(args.x)
    if strides[0] % OTHER_STRIDES or strides[1] % CONSTANT_STRIDES:
        x = x.clone(memory_format=torch.contiguous_format)
        strides = [x.stride(0), x.stride(1)]
    how = args.product.shape[2] // SIZE, args.activation, args.norm, multiprocessors(x.device)
    queue, runs = launch(backward, x.shape, *how, *strides)
    return queue, aligned(x), runs


def _differentiate(args: Arguments, needed: Any, dy: Tensor) -> Gradients:
    x, product, weight, activation, norm = args
    if norm != "none":  # with a norm, the product is worth its memory
        z = multiply(Product(x, product))[0].view(*x.shape[:2], -1, SIZE)
        features = Features(z, weight, None, None, None, activation, norm)
        wanted: Any = features._replace(weight=needed.weight)
        of_features = differentiate_features(features, wanted, dy)
        return {**_of_product(of_features["x"], needed, args), "weight": of_features["weight"]}
    dz = new(x, *x.shape[:3], product.shape[2])
    queue, source, runs = prepared(True, args)
    dtaps = new(x, x.shape[0] * runs, TAPS, weight.shape[0], dtype=torch.float32)
    matrix = aligned(product.to(x.dtype).contiguous())
    queue(source, matrix, weight.contiguous(), aligned(dy.contiguous()), dz, dtaps)
    dweight = add_parts(dtaps, weight.dtype)[:, None]
    return {**_of_product(dz, needed, args), "weight": dweight}


def _of_product(dz: Tensor | None, needed: Any, args: Arguments) -> Gradients:
    assert dz is not None
    wanted: Any = Product(needed.x, needed.product)
    gradients = differentiate_product(Product(args.x, args.product), wanted, dz.view(*args.x.shape[:3], -1))
    return {"x": gradients["x"], "product": gradients["weight"]}


apply = register("expanded_features", compute, _differentiate, _empty)


def forward(stream: FeatureStream) -> tuple[Tensor, None]:
    """y [B,T,heads,size]; inside `recomputing()` it is not saved by what follows, unless the stream says so."""
    assert stream.product is not None
    assert stream.weight is not None
    args = (stream.x, stream.product, stream.weight, stream.activation, stream.norm)
    y = apply(*args)
    return y if stream.kept else remake(y, lambda *args: compute(Arguments(*args))[0], *args), None
