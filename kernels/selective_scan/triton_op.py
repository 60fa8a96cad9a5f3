"""The selective scan in Triton: what is launched, in which order, on which tensors.

Forward: the states at the cuts between chunks, which are all that is kept, then all chunks at once. Backward: the
gradients of these states, then all chunks at once. A sequence that is one chunk, as a decoded token is, takes one
launch. There are no atomics: equal inputs give equal bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import op
from ..triton.enqueue import cdiv
from .arguments import Scan
from .triton_plan import GRADIENT_ELEMENTS, PART, SelectiveScan


def sizes(x: Tensor, rate: Tensor, c: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Any, ...]:
    """What the plan of a call is made of."""
    read = "ones" if c is None else "constant" if c.dim() == 2 else "each"
    documents = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.shape, rate.shape[1], read, x.dtype, x.device, documents


def cuts(
    to: SelectiveScan,
    x: Tensor,
    arguments: tuple[Tensor | None, ...],
    states: Tensor,
    end: Tensor | None,
    other: Tensor,
    *,
    reverse: bool,
) -> None:
    """Fills the states before all chunks and the final ones, or in reverse the gradients after and of the first."""
    totals = to.new(to.chunks, to.D, dtype=torch.float32)
    to.local(reverse)(x, *arguments, states, totals, to.layout.chunks)
    rate = arguments[1]
    assert rate is not None
    to.combine(reverse)(rate, states, totals, end, other, to.layout.segments)


def dense(*tensors: Tensor | None) -> list[Any]:
    """The tensors without gaps."""
    return [None if x is None else x.contiguous() for x in tensors]


def compute(
    x: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final states, and the states before all chunks."""
    to = SelectiveScan.of(cu_seqlens, x.shape[1], *sizes(x, rate, c, cu_seqlens))
    x, *arguments, initial = dense(x, log_decay, rate, b, c, initial_state)
    y, final, states = to.results()
    if to.whole:
        to.outputs()(x, *arguments, initial, y, final, to.layout.chunks)
    else:
        cuts(to, x, tuple(arguments), states, initial, final, reverse=False)
        to.outputs()(x, *arguments, states, y, None, to.layout.chunks)
    return y, final, states


def fake(
    x: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes of `compute`."""
    return SelectiveScan(None, *sizes(x, rate, c, cu_seqlens)).results()


def differentiate(
    arriving: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    needed: Sequence[bool],
    x: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> list[Tensor | None]:
    """The gradients of all tensors; there is none for `cu_seqlens`."""
    to = SelectiveScan.of(cu_seqlens, x.shape[1], *sizes(x, rate, c, cu_seqlens))
    x, *arguments, initial, dy, dfinal = dense(x, log_decay, rate, b, c, initial_state, *arriving)
    dy = torch.zeros_like(x) if dy is None else dy
    dinitial = to.states(to.S)
    first, after = (initial, dfinal) if to.whole else (kept[0], to.states(to.chunks))
    if not to.whole:
        cuts(to, dy, tuple(arguments), after, dfinal, dinitial, reverse=True)
    BD, BN = to.tile(GRADIENT_ELEMENTS)
    blocks = cdiv(to.D, BD)
    scratch = to.new(to.chunks * blocks, PART + to.marks, BN, BD, dtype=torch.float32)
    dx, dlog_decay = to.new(*x.shape), to.new(*log_decay.shape, dtype=log_decay.dtype)
    drate = to.states(to.chunks) if needed[2] else None
    db = None if b is None else to.new(blocks, *b.shape, dtype=torch.float32)
    dc = None
    if c is not None:
        dc = to.states(to.chunks) if c.dim() == 2 else to.new(blocks, *c.shape, dtype=torch.float32)
    given = (first, after, dy, scratch, dx, dlog_decay, drate, db, dc, dinitial if to.whole else None)
    to.gradients()(x, *arguments, *given, to.layout.chunks)
    summed = [None if g is None or z is None else g.sum(0).to(z.dtype) for g, z in ((drate, rate), (db, b), (dc, c))]
    last = None if initial_state is None else dinitial.to(initial_state.dtype)
    return [dx, dlog_decay, *summed, last, None]


selective_scan = op.register("selective_scan", compute, differentiate, fake, results=2)


def forward(a: Scan) -> tuple[Tensor, Tensor]:
    """y [B,T,D] and the final states [S,D,N]."""
    # fp64 beside an x of less: the kernels compute in fp32
    rest = (None if z is None else z.float() if z.dtype == torch.float64 else z for z in a.others)
    y, final = selective_scan(a.x, *rest, a.cu_seqlens)
    return y, final
