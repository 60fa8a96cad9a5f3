"""From logits to losses and to the gradient of the logits, row by row and in place."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

# Logits that one program holds in registers; it reads them twice, the second time from L2, where the rows of all
# programs fit if these are large and few.
BLOCK, WARPS = 8192, 16
SCALED = 4096  # numbers that one program scales


@triton.jit(do_not_specialize=["ignore_index"], do_not_specialize_on_alignment=["labels", "losses"])
def softmax_loss(logits, labels, losses, ignore_index, stride, V, BLOCK: tl.constexpr, GRADIENT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * stride
    c = tl.arange(0, BLOCK)
    label = tl.load(labels + row)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for first in tl.range(0, V, BLOCK):
                tl.store(at + first + c, tl.zeros([BLOCK], logits.dtype.element_ty), mask=first + c < V)
    else:
        largest = -float("inf")
        total = 0.0
        for first in tl.range(0, V, BLOCK):
            z = tl.load(at + first + c, mask=first + c < V, other=-float("inf")).to(tl.float32)
            new = tl.maximum(largest, tl.max(z, 0))
            total = total * tl.exp(largest - new) + tl.sum(tl.exp(z - new), 0)
            largest = new
        lse = largest + tl.log(total)
        # a label outside the vocabulary gives nan, in the loss and in the gradient
        valid = (label >= 0) & (label < V)
        loss = lse - tl.load(at + label, mask=valid, other=float("nan")).to(tl.float32)
        tl.store(losses + row, loss)
        if GRADIENT:
            tl.debug_barrier()  # no warp overwrites what another still has to read
            lse = tl.where(valid, lse, float("nan"))
            for first in tl.range(0, V, BLOCK):
                z = tl.load(at + first + c, mask=first + c < V, other=0.0).to(tl.float32)
                gradient = tl.exp(z - lse) - tl.where(first + c == label, 1.0, 0.0)
                tl.store(at + first + c, gradient.to(logits.dtype.element_ty), mask=first + c < V)


@triton.jit  # specialised on whether the size is a multiple of 16: only then are loads wide
def scale(x, factor, y, size, BLOCK: tl.constexpr):
    """y = x · factor, a scalar in memory."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(y + at, product.to(y.dtype.element_ty), mask=at < size)
