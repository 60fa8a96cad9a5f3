"""What kernels are made of: tiles of memory, places in the tables of a layout, powers of two and the logistic function.

Triton's own exponentials take care of results and divisors that are too small for fp32's exponent, with two or three
instructions more for each of them. Here such results are zeros. It pays where memory alone is not what a kernel waits
for.
"""

# kernels: what looks like a function is a program, and branches are taken when it is compiled
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

from . import layout

CHUNK = tl.constexpr(layout.CHUNK)
LOG2E = tl.constexpr(1.4426950408889634)
# other devices, and the interpreter, have no such instructions
PTX: tl.constexpr = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)


@triton.jit
def exp2(x):
    """2^x in fp32, to its last bit or two."""
    if PTX:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return tl.exp2(x)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^−x) in fp32; of a large x, as in Triton's own, the product with log2 e has fewer bits."""
    if PTX:
        divisor = 1 + exp2(x * -1.4426950408889634)
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], tl.float32, True, 1)
    return tl.sigmoid(x)


@triton.jit
def load_tile(pointer, rows, stride, columns, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, columns] of a matrix whose last axis is contiguous; zeros where a row is not valid or beyond WIDTH."""
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(pointer, rows, stride, columns, valid, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    mask = valid[:, None]
    if WIDTH % BLOCK != 0:
        mask = mask & (columns < WIDTH)[None, :]
    tl.store(pointer + rows[:, None] * stride + columns[None, :], x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def chunk_at(chunks, chunk):
    """First token of a chunk of a layout, and one past its last."""
    start = tl.load(chunks + chunk * 2)
    return start, start + tl.load(chunks + chunk * 2 + 1)


@triton.jit
def segment_at(segments, segment):
    """First token of a segment of a layout, one past its last, and its first chunk."""
    start = tl.load(segments + segment * 5)
    return start, start + tl.load(segments + segment * 5 + 1), tl.load(segments + segment * 5 + 2)
