"""The inverse of the general delta rule's chunks, in Gluon: (I + L)⁻¹ and P (I + L)⁻¹, on Hopper.

Blocks of 16 tokens are solved in fp32, one in each warp. Two rounds merge neighbours by H ← H − H L H, L being what is
between them. Erase keys may have any length, so numbers may be too large for fp16: factors are two numbers in bf16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ....gpu.gluon_halves import store_parts, truncated
from ....gpu.gluon_tiles import SHARED, at_tile, barrier
from ..hopper_groups import OF_COLUMNS, OF_PAIRS, OF_ROWS, PAIRS
from ..hopper_prepare import BLOCKS, solved_blocks, store_pairs


@gluon.jit
def add_product(x, y_s, to):
    """Add x · y, where y was stored in two parts."""
    high = truncated(x)
    low = gl.convert_layout((x - high).to(gl.bfloat16), OF_PAIRS)
    high = gl.convert_layout(high.to(gl.bfloat16), OF_PAIRS)
    to = warpgroup_mma(low, y_s.index(0), to, is_async=True)
    to = warpgroup_mma(high, y_s.index(1), to, is_async=True)
    to = warpgroup_mma(high, y_s.index(0), to, is_async=True)
    return warpgroup_mma_wait(0, deps=[to])


@gluon.jit
def merged(H, lower_s, inverse_s, here):
    """H of blocks twice as large, from that of blocks whose neighbours are `here`; `lower_s` has −L."""
    barrier()  # nobody reads `inverse_s` any more
    store_parts(inverse_s, H)
    fence_async_shared()
    barrier()
    between = add_product(H, lower_s, gl.zeros([64, 64], gl.float32, PAIRS))
    return add_product(gl.where(here, between, 0.0), inverse_s, H)


@gluon.jit
def solve_pairs(products, inverse, scores, tiles):
    """Compute `inverse` and `scores` from L and scale · P, products [2,tiles,64,64]."""
    tile = gl.program_id(0).to(gl.int64)
    lower_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
    inverse_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], SHARED)
    lower = -gl.load(at_tile(products, tile * 64, 0, 64, PAIRS, 64, 64))
    P = gl.load(at_tile(products, (tiles + tile) * 64, 0, 64, PAIRS, 64, 64))
    store_parts(lower_s, lower)
    r = gl.expand_dims(gl.arange(0, 64, OF_ROWS), 1)
    c = gl.expand_dims(gl.arange(0, 64, OF_COLUMNS), 0)
    ones = gl.zeros([64], gl.float32, gl.SliceLayout(1, BLOCKS)) + 1.0
    H = solved_blocks(lower, ones)
    H = merged(H, lower_s, inverse_s, (r // 32 == c // 32) & (r // 16 != c // 16))
    H = merged(H, lower_s, inverse_s, r // 32 != c // 32)
    barrier()
    store_parts(inverse_s, H)
    fence_async_shared()
    barrier()
    weights = add_product(P, inverse_s, gl.zeros([64, 64], gl.float32, PAIRS))
    store_pairs(inverse, tile, H.to(gl.bfloat16))
    store_pairs(scores, tile, weights.to(gl.bfloat16))
