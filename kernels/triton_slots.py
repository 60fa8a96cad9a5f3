"""Where the chunks of all sequences lie, for kernels that cut time into chunks, sequence by sequence.

Every chunk has a slot in the tensors that pass from kernel to kernel. Packed document n begins at slot
⌊start / length⌋ + n: that needs no table, at the price of a few slots that stay empty.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def sequence_bounds(n, cu_seqlens, T, length, PACKED: tl.constexpr):
    """First token of sequence n, one past its last, and its first slot; chunks have `length` tokens."""
    if PACKED:
        start = tl.load(cu_seqlens + n).to(tl.int32)
        stop = tl.load(cu_seqlens + n + 1).to(tl.int32)
        slot = start // length + n
    else:
        start = n * T
        stop = start + T
        slot = n * tl.cdiv(T, length)
    return start, stop, slot


@triton.jit
def chunk_bounds(slot, cu_seqlens, sequences, T, length, PACKED: tl.constexpr):
    """First token of the chunk in a slot and one past the last token of its sequence; an empty slot has none."""
    if PACKED:
        n = 0
        after = sequences
        while after - n > 1:
            middle = (n + after) // 2
            earlier = tl.load(cu_seqlens + middle).to(tl.int32) // length + middle <= slot
            n = tl.where(earlier, middle, n)
            after = tl.where(earlier, after, middle)
    else:
        n = slot // tl.cdiv(T, length)
    start, stop, first = sequence_bounds(n, cu_seqlens, T, length, PACKED)
    return start + (slot - first) * length, stop
