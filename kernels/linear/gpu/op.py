"""Products of few rows with a weight: every program reads some rows of the weight once, for all rows of the input.

One or two rows are multiplied without tensor cores, more of them with these, in tiles that hold all rows. In
deterministic mode, one or two rows take tensor cores, too, which on Hopper add in the same order in tiles of any size.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import register
from ...core.deterministic import is_deterministic
from ...core.read_only import is_read_only
from ...gpu.device import HOPPER, capability, multiprocessors
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import prefetch, wait
from ...gpu.tiles import factor_dtype, sigmoid
from .. import MOST_PRODUCTS, MOST_ROWS, Product, tiles

ROWS = 2  # most rows without tensor cores
INNER, MOST_STAGES = 128, 8  # inputs of a tile with tensor cores, and how many of these are on their way at most
# outputs of such a tile: the narrowest with at most one program per multiprocessor, else the widest
WIDTHS = (16, 32, 64)
SHARED = 200 << 10  # bytes of shared memory for the tiles that are on their way: many, to hide the latency of L2
INPUTS, MOST_OUTPUTS, WARPS = 1024, 8, 4  # of a tile without tensor cores
NUMBERS = 16 << 10  # products that such a tile adds up at most, to fit into registers
EARLY_BYTES = 48 << 10  # of weights that a program loads into registers while it waits for x, if they are `read_only`
PROGRAMS = 128  # fewest programs, if there are as many outputs: one for most multiprocessors


@triton.jit
def gated(gate, up, dtype: tl.constexpr, GATE: tl.constexpr):
    """The gated product of two sums, both rounded as in memory."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if GATE == "silu":
        gate *= tl.sigmoid(gate)
    return gate * up


@triton.jit
def tanh(x):
    """tanh(x); near 0, where 2σ(2x) − 1 has few digits, by its series."""
    return tl.where(tl.abs(x) < 0.03, x - x * x * x / 3, 2 * sigmoid(2 * x) - 1)


@triton.jit
def prefetch_rows(weight, first, O, I: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr, OVERLAP: tl.constexpr):
    """Start to load the rows of a tile, in each part of the weight."""
    for part in tl.static_range(PARTS):
        size = tl.minimum(OUTPUTS, O - first) * I
        prefetch(weight, (first + part * O).to(tl.int64) * I, size, OUTPUTS * I, OVERLAP)


@triton.jit
def load_tile(weight, part, first, start, O, I: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """Load a part's rows from `first` on and its columns from `start` on; not into L1, as nothing reads them again."""
    n, k = first + tl.arange(0, OUTPUTS), start + tl.arange(0, INPUTS)
    at = (n + part * O)[:, None].to(tl.int64) * I + k[None, :]
    return tl.load(weight + at, mask=(n < O)[:, None] & (k < I)[None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def load_early(
    weight, first, O, I: tl.constexpr, PARTS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Load the first EARLY tiles of each part."""
    tiles = ()
    for tile in tl.static_range(EARLY):
        for part in tl.static_range(PARTS):
            tiles = tiles + (load_tile(weight, part, first, tile * INPUTS, O, I, OUTPUTS, INPUTS),)
    return tiles


@triton.jit
def multiply_rows(
    x, weight, bias, y, early, first, O,
    I: tl.constexpr, ROWS: tl.constexpr, GATE: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute the outputs from `first` on, for all rows of x; the arguments are those of `linear_rows`.

    `early` are the tiles of `load_early`.
    """
    PARTS: tl.constexpr = 2 if GATE == "silu" or GATE == "identity" else 1
    n = first + tl.arange(0, OUTPUTS)
    sums = ()
    for _ in tl.static_range(ROWS * PARTS):
        sums = sums + (tl.zeros([OUTPUTS, INPUTS], tl.float32),)
    for start in tl.static_range(0, I, INPUTS):
        k = start + tl.arange(0, INPUTS)
        longer = ()
        for part in tl.static_range(PARTS):
            if start < EARLY * INPUTS:
                w = early[start // INPUTS * PARTS + part].to(tl.float32)
            else:
                w = load_tile(weight, part, first, start, O, I, OUTPUTS, INPUTS).to(tl.float32)
            for m in tl.static_range(ROWS):
                u = tl.load(x + m * I + k, mask=k < I, other=0.0).to(tl.float32)
                longer = longer + (sums[part * ROWS + m] + w * u[None, :],)
        sums = longer
    added = tl.zeros([OUTPUTS], tl.float32)
    if bias is not None:
        added = tl.load(bias + n, mask=n < O, other=0.0).to(tl.float32)
    for m in tl.static_range(ROWS):
        total = tl.sum(sums[m], 1) + added
        if PARTS == 2:
            total = gated(total, tl.sum(sums[ROWS + m], 1), y.dtype.element_ty, GATE)
        elif GATE != "none":
            total = total.to(y.dtype.element_ty).to(tl.float32)  # rounded as in memory
            total = sigmoid(total) if GATE == "sigmoid" else tanh(total)
        tl.store(y + m * O + n, total.to(y.dtype.element_ty), mask=n < O)


@triton.jit(do_not_specialize=["O"])
def linear_rows(
    x,  # [ROWS,I]
    weight,  # [O,I], or [2·O,I] with a gate
    bias,  # [O]; None with a gate
    y,  # [ROWS,O]
    O,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    GATE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EARLY: tl.constexpr,  # tiles of each part that are loaded before x is there
    OVERLAP: tl.constexpr,
):
    PARTS: tl.constexpr = 1 if GATE == "none" else 2
    first = tl.program_id(0) * OUTPUTS
    early = load_early(weight, first, O, I, PARTS, OUTPUTS, INPUTS, EARLY)
    if EARLY * INPUTS < I:
        prefetch_rows(weight, first, O, I, OUTPUTS, PARTS, OVERLAP)
    wait(OVERLAP)
    multiply_rows(x, weight, bias, y, early, first, O, I, ROWS, GATE, OUTPUTS, INPUTS, EARLY)


@triton.jit
def product(
    x, weight, y, program, PRODUCTS: tl.constexpr, AT: tl.constexpr, ROWS: tl.constexpr, READY: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Prefetch the weight of the product AT if it is that of the program; with READY, multiply."""
    O: tl.constexpr = PRODUCTS[AT]
    I: tl.constexpr = PRODUCTS[AT + 1]
    ACTIVATION: tl.constexpr = PRODUCTS[AT + 2]
    OUTPUTS: tl.constexpr = PRODUCTS[AT + 3]
    INPUTS: tl.constexpr = PRODUCTS[AT + 4]
    FIRST: tl.constexpr = PRODUCTS[AT + 5]
    if (program >= FIRST) & (program < FIRST + (O + OUTPUTS - 1) // OUTPUTS):
        first = (program - FIRST) * OUTPUTS
        if READY:
            multiply_rows(x, weight, None, y, (), first, O, I, ROWS, ACTIVATION, OUTPUTS, INPUTS, 0)
        else:
            prefetch_rows(weight, first, O, I, OUTPUTS, 1, OVERLAP)


@triton.jit
def linear_several(
    x0, x1, x2, x3, x4, x5, x6, x7,  # [ROWS,I] of each product, None behind the last
    weight0, weight1, weight2, weight3, weight4, weight5, weight6, weight7,  # [O,I]
    y0, y1, y2, y3, y4, y5, y6, y7,  # [ROWS,O]
    PRODUCTS: tl.constexpr,  # of each: O, I, the activation, OUTPUTS and INPUTS as above, and the first program
    COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    xs, ys = (x0, x1, x2, x3, x4, x5, x6, x7), (y0, y1, y2, y3, y4, y5, y6, y7)
    weights = (weight0, weight1, weight2, weight3, weight4, weight5, weight6, weight7)
    for i in tl.static_range(COUNT):
        product(xs[i], weights[i], ys[i], tl.program_id(0), PRODUCTS, 6 * i, ROWS, False, OVERLAP)
    wait(OVERLAP)
    for i in tl.static_range(COUNT):
        product(xs[i], weights[i], ys[i], tl.program_id(0), PRODUCTS, 6 * i, ROWS, True, OVERLAP)


@triton.jit(do_not_specialize=["M", "O"])
def linear_tile(
    x,  # [M,I]
    weight,  # [O,I], or [2·O,I] with a gate
    bias,  # [O]; None with a gate
    y,  # [M,O]
    M,
    O,
    I: tl.constexpr,
    ROWS: tl.constexpr,
    GATE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    DTYPE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    PARTS: tl.constexpr = 1 if GATE == "none" else 2
    first = tl.program_id(0) * OUTPUTS
    prefetch_rows(weight, first, O, I, OUTPUTS, PARTS, OVERLAP)
    wait(OVERLAP)
    m, n, k = tl.arange(0, ROWS)[:, None], first + tl.arange(0, OUTPUTS), tl.arange(0, INNER)
    of_x, of_weight = x + m * I + k[None, :], weight + n[None, :].to(tl.int64) * I + k[:, None]
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    of_up = of_weight + O.to(tl.int64) * I
    ups = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, I, INNER):
        inside = k < INNER if I % INNER == 0 else start + k < I
        left = tl.load(of_x + start, mask=(m < M) & inside[None, :], other=0.0).to(DTYPE)
        exists = inside[:, None] & (n < O)[None, :]
        sums = tl.dot(left, tl.load(of_weight + start, mask=exists, other=0.0).to(DTYPE), sums, input_precision="ieee")
        if PARTS == 2:
            ups = tl.dot(left, tl.load(of_up + start, mask=exists, other=0.0).to(DTYPE), ups, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + n, mask=n < O, other=0.0).to(tl.float32)[None, :]
    if PARTS == 2:
        sums = gated(sums, ups, y.dtype.element_ty, GATE)
    tl.store(y + m.to(tl.int64) * O + n[None, :], sums.to(y.dtype.element_ty), mask=(m < M) & (n < O)[None, :])


class Arguments(NamedTuple):
    x: Tensor  # […,I]
    weight: Tensor  # [O,I], or [2·O,I]: the gate and what it multiplies
    bias: Tensor | None  # [O]; None with a gate
    gate: str  # activation of the gate, or none


def _parts(args: Arguments) -> int:
    return 1 if args.gate == "none" else 2


def _empty(args: Arguments) -> tuple[Tensor]:
    return (new(args.x, *args.x.shape[:-1], len(args.weight) // _parts(args)),)


def _compute(args: Arguments) -> tuple[Tensor]:
    x, weight, bias, gate = args
    (both, I), (y,), rows, parts = weight.shape, _empty(args), x.numel() // x.shape[-1], _parts(args)
    O, tensors = y.shape[-1], (x, weight, bias, y)
    constants: dict[str, Any] = {"I": I, "GATE": gate, "overlap": True}
    if rows > ROWS or is_deterministic():
        columns = next((n for n in WIDTHS if cdiv(both, n) <= multiprocessors(x.device)), WIDTHS[-1])
        stages = min(MOST_STAGES, SHARED // ((MOST_ROWS + columns) * INNER * x.element_size()))
        columns //= parts
        constants |= {"ROWS": MOST_ROWS, "OUTPUTS": columns, "INNER": INNER}
        constants |= {"DTYPE": factor_dtype(x.dtype), "stages": stages}
        enqueue(linear_tile, cdiv(O, columns), *tensors, rows, O, **constants)
        return (y,)
    outputs, inputs = _tile(rows, both, I, parts)
    tiles = EARLY_BYTES // (parts * outputs * inputs * weight.element_size()) if is_read_only(weight) else 0
    constants |= {"ROWS": rows, "OUTPUTS": outputs, "INPUTS": inputs, "EARLY": min(tiles, cdiv(I, inputs))}
    constants["warps"] = WARPS
    enqueue(linear_rows, cdiv(O, outputs), *tensors, O, **constants)
    return (y,)


def _tile(rows: int, O: int, I: int, parts: int = 1) -> tuple[int, int]:
    """Outputs and inputs of a tile without tensor cores."""
    outputs = min(MOST_OUTPUTS, O // PROGRAMS, NUMBERS // (max(rows, 1) * max(I, INPUTS)))
    return 1 << max(outputs // parts, 1).bit_length() - 1, min(INPUTS, next_power_of_2(I))


def several(products: Sequence[Product]) -> list[Tensor]:
    """activation(x Wᵀ) of each of at most `MOST_PRODUCTS` products of the same one or two rows."""
    rows, programs, sizes = products[0].x.numel() // products[0].x.shape[-1], 0, list[int | str]()
    for _, weight, activation in products:
        tile = _tile(rows, *weight.shape)
        sizes += [*weight.shape, activation, *tile, programs]
        programs += cdiv(len(weight), tile[0])
    ys = [new(x, *x.shape[:-1], len(weight)) for x, weight, _ in products]
    tensors: list[Tensor | None] = []
    for each in ([x.contiguous() for x, _, _ in products], [weight.contiguous() for _, weight, _ in products], ys):
        tensors += [*each, *[None] * (MOST_PRODUCTS - len(each))]
    constants: dict[str, Any] = {"PRODUCTS": tuple(sizes), "COUNT": len(products), "ROWS": rows}
    enqueue(linear_several, programs, *tensors, **constants, warps=WARPS, overlap=True)
    return ys


linear_few = register("linear_few", _compute, None, _empty)


def serves(x: Tensor) -> bool:
    """Return whether these kernels are made for a device and a number of rows: the tiles are for Hopper."""
    return (x.numel() <= ROWS * x.shape[-1] and not is_deterministic()) or capability(x.device) == HOPPER


def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y […,O]; see `linear`."""
    if not serves(x):
        return tiles.linear(x, weight, bias)
    return linear_few(x.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous(), "none")
