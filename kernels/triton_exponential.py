"""Powers of two and the logistic function, for kernels that are not busy with memory alone.

Triton's own take care of results and divisors that are too small for fp32's exponent, with two or three instructions
more for each of them. Here such results are zeros.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl

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
