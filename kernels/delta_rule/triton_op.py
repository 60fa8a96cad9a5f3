"""The (gated) delta rule in Triton, forward and backward: which kernels run, in which order, on which tensors.

Forward: `prepare` for all chunks in parallel, then `scan_forward` along time. Backward: `scan_backward` along time,
then the gradients of all chunks in parallel; or everything in one pass along time (`gluon_gradients.py`). Each of the
H·E recurrences is computed separately: subheads read the values of their head, and value heads the keys of their group,
without copies. Contributions of several recurrences to one tensor are summed afterwards, in a fixed order: equal inputs
give equal bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import op
from ..arguments import Recurrences
from ..triton.layout import CHUNK
from ..triton.parts import add_heads, add_subheads
from . import learned_constant, triton_step
from .triton_plan import DeltaRule

SHORT = 16  # up to this key size, everything is computed in fp32
NOTHING, CHUNKS, ALL = range(3)  # what is kept for the gradients; chunks are what `prepared` returns
KEPT = (0, 4, 7)  # how many tensors that is
FEW_ENOUGH = 1024  # channels of a head's keys, in all subheads, up to which chunks are kept
GATES = {1: "constant", 3: "per step"}  # by the number of axes of the log decay


def plan(q: Tensor, v: Tensor, subheads: int, scale: float, cu_seqlens: Tensor | None) -> DeltaRule:
    """The plan of a call, for which only the shapes, dtype and device of q and v matter."""
    documents = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return DeltaRule.of(cu_seqlens, q.shape[1], q.shape, v.shape, subheads, scale, q.dtype, q.device, documents)


def prepared(to: DeltaRule, q: Tensor, k: Tensor, beta: Tensor, log_decay: Tensor | None) -> tuple[Tensor, ...]:
    """Inverse, scores, gates and, if sequences are cut, bounds of every chunk."""
    chunks = tuple(to.new(*shape, dtype=dtype) for shape, dtype in to.kept[:4])
    gate = "none" if log_decay is None else GATES[log_decay.dim()]
    decays = None if log_decay is None else log_decay.contiguous()
    bounds = chunks[3] if to.cut or to.halved else None
    if to.in_gluon:
        q, k = aligned(q), aligned(k)
    to.prepare(gate)(q, k, decays, beta, *chunks[:3], bounds, to.layout.chunks)
    return chunks


def aligned(x: Tensor) -> Tensor:
    """Return x, cloned if a pass in Gluon cannot copy it 16 bytes at a time."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def cuts(to: DeltaRule, transition: Tensor, local: Tensor, end: Tensor | None, *, reverse: bool) -> Tensor:
    """The states before all segments (with `reverse`, the gradients after them), from those at that end."""
    states = to.states()
    to.combine(reverse)(transition, local, end, states, to.layout.sequences)
    return states


def run_forward(
    to: DeltaRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: tuple[Tensor, ...],
    initial: Tensor | None,
    o: Tensor | None,
    *,
    save: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The final states, and what the gradients need; writes the outputs of every recurrence to o [B,T,H·E,V], if given.

    What the gradients need are, with `save`, U and the states before all chunks, and in any case the transition of
    every segment.
    """
    table = to.layout.segments
    initial = None if initial is None else initial.contiguous()
    transition = to.new(to.most, to.M, to.K, to.K, dtype=torch.float32)
    if to.cut:
        local = to.new(to.cut, to.M, to.K, to.V, dtype=torch.float32)
        nothing = (None, None, None, None)
        to.forward(to.cut, to.V)(q, k, v, *chunks, *nothing, local, table)
        to.forward(to.cut, to.K)(q, k, None, *chunks, *nothing, transition, table)
        initial = cuts(to, transition, local, initial, reverse=False)
    final = to.states()
    kept = [to.new(*shape, dtype=dtype) for shape, dtype in to.kept[4:6]] if save else []
    u, states = kept or (None, None)
    to.forward(len(table), to.V)(q, k, v, *chunks[:3], None, initial, o, u, states, final, table)
    return final.index_select(0, to.ends[1]) if to.cut else final, [*kept, transition]


def gradients_of_ends(
    to: DeltaRule,
    q: Tensor,
    k: Tensor,
    do: Tensor,
    chunks: tuple[Tensor, ...],
    transition: Tensor,
    dfinal: Tensor | None,
) -> Tensor | None:
    """The gradients of the states after all segments; None if all are zero."""
    if not to.cut:
        return dfinal
    local = to.new(to.cut, to.M, to.K, to.V, dtype=torch.float32)
    to.backward(to.cut)(q, k, do, *chunks, None, None, None, local, to.layout.segments)
    return cuts(to, transition, local, dfinal, reverse=True)


def at_once(
    to: DeltaRule,
    q: Tensor,
    k: Tensor,
    do: Tensor,
    beta: Tensor,
    kept: Sequence[Tensor],
    dends: Tensor | None,
    *,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Gradients of q, k, v, β and the first states, and what that of the log decay is made of, in one pass."""
    inverse, scores, gates, bounds, u, states, _ = kept
    B, T, M, slots = to.B, to.T, to.M, len(to.layout.chunks)
    dq, dk, dv = to.new(B, T, M, to.K), to.new(B, T, M, to.K), to.new(B, T, M, to.V)
    dbeta, dinitial, table = to.new(B, T, M, dtype=torch.float32), to.states(), to.layout.segments
    sums: tuple[Tensor | None, ...] = (None,) * 4
    if gated:
        sums = tuple(to.new(slots, M, parts, CHUNK, dtype=torch.float32) for parts in (4, 2, 2, 2))
    q, k, do = (aligned(x) for x in (q, k, do))
    if to.halved:
        middle, table = to.states(), to.halves
        remembered = bounds if dends is None else None
        along = (inverse, scores, gates, remembered, dends, None, None, middle)
        to.backward(len(to.second_halves))(q, k, do, *along, to.second_halves)
        dends = torch.stack((middle, torch.zeros_like(middle) if dends is None else dends), 1).flatten(0, 1)
        dinitial = to.new(*dends.shape, dtype=torch.float32)
    inputs = (q, k, u, do, beta, inverse, scores, gates, states, dends)
    to.one_pass()(*inputs, dq, dk, dv, dbeta, *sums, dinitial, table)
    return dq, dk, dv, dbeta, dinitial[::2] if to.halved else dinitial, sums


def in_three_passes(
    to: DeltaRule,
    q: Tensor,
    k: Tensor,
    do: Tensor,
    beta: Tensor,
    kept: Sequence[Tensor],
    dends: Tensor | None,
    *,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Compute all gradients in three passes: one along time, then those of queries and of keys for all chunks in
    parallel.
    """
    inverse, scores, gates, _, u, states, _ = kept
    B, T, M, K, table, slots = to.B, to.T, to.M, to.K, to.layout.chunks, len(to.layout.chunks)
    dv, dinitial, dstates = to.new(B, T, M, to.V), to.states(), to.new(slots, M, K, to.V)
    segments = to.layout.segments
    to.backward(len(segments))(q, k, do, inverse, scores, gates, None, dends, dv, dstates, dinitial, segments)

    from_queries = from_keys = before_t = across = None
    if gated:
        parts, parts_k = to.blocks("dq")[2], to.blocks("dk")[2]
        from_queries, from_keys, before_t = (
            to.new(slots, M, n, CHUNK, dtype=torch.float32) for n in (parts, parts_k, parts_k)
        )
        across = to.new(slots, M, parts_k, 1, dtype=torch.float32)
    reads, writes = to.new(*inverse.shape), to.new(*inverse.shape)
    diagonal = to.new(slots, M, CHUNK, dtype=torch.float32)
    dq, dk, dbeta = to.new(B, T, M, K), to.new(B, T, M, K), to.new(B, T, M, dtype=torch.float32)
    args: tuple[Any, ...] = (q, k, u, do, dv, beta, gates, states, dq, dbeta, reads, writes, diagonal, from_queries)
    to.gradient_of_queries()(*args, table)
    args = (q, k, u, dv, gates, states, dstates, reads, writes, diagonal, dk, from_keys, before_t, across)
    to.gradient_of_keys()(*args, table)
    return dq, dk, dv, dbeta, dinitial, (from_queries, from_keys, before_t, across)


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    subheads: int,
    scale: float,
    keep: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final states, and what `differentiate` would otherwise recompute: by `keep` all, some or none of it."""
    to = plan(q, v, subheads, scale, cu_seqlens)
    q, k, v, beta = q.contiguous(), k.contiguous(), v.contiguous(), beta.contiguous()
    chunks = prepared(to, q, k, beta, log_decay)
    o = to.new(to.B, to.T, to.M, to.V)
    final, along = run_forward(to, q, k, v, chunks, initial_state, o, save=keep == ALL)
    whole = (*chunks, *along)[: KEPT[keep]]
    nothing = (to.new(0, dtype=dtype) for _, dtype in to.kept[len(whole) :])
    inverse, scores, gates, bounds, u, states, transition = *whole, *nothing
    o = add_subheads(o, subheads)
    return o, final, inverse, scores, gates, bounds, u, states, transition


def differentiate(
    gradients: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    needed: Sequence[bool],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    subheads: int,
    scale: float,
    keep: int,
) -> list[Tensor | None]:
    """The gradients of all tensors; None for `cu_seqlens`."""
    to = plan(q, v, subheads, scale, cu_seqlens)
    q, k, beta = q.contiguous(), k.contiguous(), beta.contiguous()
    if keep != ALL:
        chunks = tuple(kept[:4]) if keep == CHUNKS else prepared(to, q, k, beta, log_decay)
        kept = (*chunks, *run_forward(to, q, k, v.contiguous(), chunks, initial_state, None, save=True)[1])
    do, dfinal = (None if x is None else x.contiguous() for x in gradients)
    do = to.new(*v.shape).zero_() if do is None else do
    dends = gradients_of_ends(to, q, k, do, tuple(kept[:4]), kept[-1], dfinal)
    run = at_once if to.at_once else in_three_passes
    dq, dk, dv, dbeta, dinitial, sums = run(to, q, k, do, beta, kept, dends, gated=log_decay is not None)

    dlog_decay = None
    if log_decay is not None:
        dlog_decay = to.new(to.B, to.T, to.M, dtype=torch.float32)
        to.gradient_of_log_decay(GATES[log_decay.dim()])(dlog_decay, log_decay.contiguous(), *sums, to.layout.chunks)
        if log_decay.dim() == 1:
            dlog_decay = dlog_decay.sum((0, 1))
        dlog_decay = dlog_decay.to(log_decay.dtype)
    dq, dk = (add_heads(x, to.R, subheads) for x in (dq, dk))
    dv = add_subheads(dv, subheads)
    dinitial = dinitial.index_select(0, to.ends[0]) if to.cut else dinitial
    first = None if initial_state is None else dinitial.to(initial_state.dtype).contiguous()
    return [dq, dk, dv, dbeta.to(beta.dtype), dlog_decay, first, None]


def fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    subheads: int,
    scale: float,
    keep: int,
) -> tuple[Tensor, ...]:
    """Empty tensors of the shapes and dtypes that `compute` returns."""
    documents = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    to = DeltaRule(q.shape, v.shape, subheads, scale, q.dtype, q.device, documents)
    return tuple(to.new(*shape, dtype=dtype) for shape, dtype in to.shapes(KEPT[keep]))


def unread(*args: Any) -> Sequence[int]:
    """The values: if U is saved, the gradients do not read them."""
    keep, values = args[-1], 2
    return (values,) if keep == ALL else ()


delta_rule = op.register("delta_rule", compute, differentiate, fake, results=2, unread=unread)


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V]."""
    assert a.beta is not None
    wanted = a.differentiated
    if a.v.shape[1] == 1 and a.documents is None and not wanted:
        return triton_step.forward(a)
    # With subheads everything takes E times the memory, with a long head the states do. What goes first are U and the
    # states, which take three times as much as the rest.
    few = a.subheads * a.q.shape[3] <= FEW_ENOUGH
    keep = NOTHING if not wanted else ALL if a.keep_states else CHUNKS if few else NOTHING
    # fp16 lacks the range for a state, and for what a small β multiplies. Two more cases would exceed the error that
    # bf16 is allowed: a chunk of far more tokens than its keys can tell apart, and the gradient of a constant decay, a
    # sum of contributions of either sign from all steps.
    exact = a.q.dtype == torch.float16 or a.q.shape[3] <= SHORT or learned_constant(a)
    q, k, v = (x.float() if exact else x for x in (a.q, a.k, a.v))
    o, final = delta_rule(q, k, v, a.beta, a.log_decay, a.initial_state, a.cu_seqlens, a.subheads, a.scale, keep)
    return o.to(a.v.dtype), final
