"""The (gated) delta rule in Triton, forward and backward: which kernels run, in which order, on which tensors.

Forward: `prepare` for all chunks in parallel, then `scan_forward` along time. Backward: `scan_backward` along time,
then the gradients of all chunks in parallel; or everything in one pass along time (`hopper_backward.py`). Each of the
H·E recurrences is computed separately: subheads read the values of their head, and value heads the keys of their group,
without copies. Contributions of several recurrences to one tensor are summed afterwards, in a fixed order: equal inputs
give equal bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.allocation import aligned
from ...core.autograd import Gradients, register
from ...core.recurrence import Recurrences
from ...gpu.layout import CHUNK
from ...gpu.paths import note, takes
from ...gpu.reductions import add_heads, add_subheads
from .. import learned_constant
from . import step
from .plan import DeltaRule
from .select import BACKWARD, ONE_TOKEN

SHORT = 16  # up to this key size, everything is computed in fp32
NOTHING, CHUNKS, ALL = range(3)  # what is kept for the gradients; chunks are what `prepared` returns
KEPT = (0, 4, 8)  # how many tensors that is
FEW_ENOUGH = 1024  # channels of a head's keys, in all subheads, up to which chunks are kept
GATES = {1: "constant", 3: "per step"}  # by the number of axes of the log decay


def prepared(
    plan: DeltaRule, q: Tensor, k: Tensor, beta: Tensor, log_decay: Tensor | None, *, scores: bool = True
) -> tuple[Tensor | None, ...]:
    """Inverse, scores, gates and, if sequences are cut or run in halves, bounds of every chunk.

    Without `scores`, these are for a pass that computes the scores itself: the second result is None, and the first is
    β H in place of the inverse.
    """
    chunks: tuple[Tensor | None, ...]
    if scores:
        chunks = plan.empty(plan.kept[:4])
    else:
        half = torch.float16 if plan.dtype == torch.bfloat16 else plan.dtype
        chunks = (plan.new(plan.slots, plan.M, CHUNK, CHUNK, dtype=half), None, *plan.empty(plan.kept[2:4]))
    gate = "none" if log_decay is None else GATES[log_decay.dim()]
    decays = None if log_decay is None else log_decay.contiguous()
    bounds = chunks[3] if plan.cut or plan.halved else None
    if plan.prepare_path == "hopper_prepare":
        q, k = aligned(q), aligned(k)
    plan.prepare(gate)(q, k, decays, beta, *chunks[:3], bounds, plan.layout.chunks)
    return chunks


def cuts(
    plan: DeltaRule, transition: Tensor, has_transition: Tensor, local: Tensor, end: Tensor | None, *, reverse: bool
) -> Tensor:
    """The states before all segments (with `reverse`, the gradients after them), from those at that end."""
    states = plan.states()
    plan.combine(reverse)(transition, has_transition, local, end, states, plan.layout.sequences)
    return states


def run_forward(
    plan: DeltaRule,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: tuple[Tensor | None, ...],
    initial: Tensor | None,
    o: Tensor | None,
    *,
    save: bool,
    wanted: bool = True,
) -> tuple[Tensor | None, tuple[Tensor | None, ...]]:
    """The final states if `wanted`, and what the gradients need; writes all outputs to o [B,T,H·E,V], if given.

    What the gradients need are, with `save`, U and the states before all chunks, and in any case the transition of
    every segment, and for each segment 1, or 0 if its transition is zero.
    """
    table = plan.layout.segments
    initial = None if initial is None else initial.contiguous()
    transition, has_transition = of_segments = plan.empty(plan.kept[6:])
    if plan.cut:
        assert transition is not None
        assert has_transition is not None
        local = plan.new(plan.cut, plan.M, plan.K, plan.V, dtype=torch.float32)
        nothing = (None, None, None, None)
        plan.forward(plan.cut, plan.V)(q, k, v, *chunks, *nothing, local, None, table)
        plan.forward(plan.cut, plan.K)(q, k, None, *chunks, *nothing, transition, has_transition, table)
        initial = cuts(plan, transition, has_transition, local, initial, reverse=False)
    # the state of long keys lies there, and segments are added up there
    final = plan.states() if wanted or plan.long or plan.cut else None
    u, states = saved = plan.empty(plan.kept[4:6]) if save else (None, None)
    if plan.in_gluon:
        plan.outputs(save)(aligned(q), aligned(k), aligned(v), *chunks[:3], initial, o, u, states, final, table)
    else:
        plan.forward(len(table), plan.V)(q, k, v, *chunks[:3], None, initial, o, u, states, final, None, table)
    final = None if final is None or not wanted else final.index_select(0, plan.ends[1]) if plan.cut else final
    return final, (*saved, *of_segments)


def gradients_of_ends(
    plan: DeltaRule,
    q: Tensor,
    k: Tensor,
    do: Tensor,
    chunks: tuple[Tensor | None, ...],
    transition: Tensor | None,
    has_transition: Tensor | None,
    dfinal: Tensor | None,
) -> Tensor | None:
    """The gradients of the states after all segments; None if all are zero."""
    if not plan.cut:
        return dfinal
    assert transition is not None
    assert has_transition is not None
    local = plan.new(plan.cut, plan.M, plan.K, plan.V, dtype=torch.float32)
    plan.backward(plan.cut)(q, k, do, *chunks, None, None, None, local, plan.layout.segments)
    return cuts(plan, transition, has_transition, local, dfinal, reverse=True)


def in_one_pass(
    plan: DeltaRule,
    q: Tensor,
    k: Tensor,
    do: Tensor,
    beta: Tensor,
    residuals: Sequence[Tensor | None],
    dends: Tensor | None,
    *,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Gradients of q, k, v, β and the first states, and what that of the log decay is made of, in one pass."""
    inverse, scores, gates, bounds, u, states, *_ = residuals
    B, rows, M, slots = plan.B, plan.rows, plan.M, len(plan.layout.chunks)
    dq, dk, dv = plan.new(B, plan.T, M, plan.K), plan.new(B, rows, M, plan.K), plan.new(B, rows, M, plan.V)
    dbeta, dinitial, table = plan.new(B, rows, M, dtype=torch.float32), plan.states(), plan.layout.segments
    sums: tuple[Tensor | None, ...] = (None,) * 4
    if gated:
        sums = tuple(plan.new(slots, M, parts, CHUNK, dtype=torch.float32) for parts in (4, 2, 2, 2))
    q, k, do = (aligned(x) for x in (q, k, do))
    if plan.halved:
        middle, table = plan.states(), plan.halves
        remembered = bounds if dends is None else None
        along = (inverse, scores, gates, remembered, dends, None, None, middle)
        plan.backward(len(plan.second_halves))(q, k, do, *along, plan.second_halves)
        dends = torch.stack((middle, torch.zeros_like(middle) if dends is None else dends), 1).flatten(0, 1)
        dinitial = plan.new(*dends.shape, dtype=torch.float32)
    inputs = (q, k, u, do, beta, inverse, scores, gates, states, dends)
    plan.one_pass()(*inputs, dq, dk, dv, dbeta, *sums, dinitial, table)
    return dq, dk, dv, dbeta, dinitial[::2] if plan.halved else dinitial, sums


def in_three_passes(
    plan: DeltaRule,
    q: Tensor,
    k: Tensor,
    do: Tensor,
    beta: Tensor,
    residuals: Sequence[Tensor | None],
    dends: Tensor | None,
    *,
    gated: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor | None, ...]]:
    """Compute all gradients in three passes: one along time, then those of queries and of keys for all chunks in
    parallel.
    """
    inverse, scores, gates, _, u, states, *_ = residuals
    B, rows, M, K, table, slots = plan.B, plan.rows, plan.M, plan.K, plan.layout.chunks, len(plan.layout.chunks)
    dv, dinitial, dstates = plan.new(B, rows, M, plan.V), plan.states(), plan.new(slots, M, K, plan.V)
    segments = plan.layout.segments
    plan.backward(len(segments))(q, k, do, inverse, scores, gates, None, dends, dv, dstates, dinitial, segments)

    from_queries = from_keys = before_t = across = None
    if gated:
        parts, parts_k = plan.blocks("dq")[2], plan.blocks("dk")[2]
        from_queries, from_keys, before_t = (
            plan.new(slots, M, n, CHUNK, dtype=torch.float32) for n in (parts, parts_k, parts_k)
        )
        across = plan.new(slots, M, parts_k, 1, dtype=torch.float32)
    reads, writes = (plan.new(plan.slots, M, CHUNK, CHUNK) for _ in range(2))
    diagonal = plan.new(slots, M, CHUNK, dtype=torch.float32)
    dq, dk, dbeta = plan.new(B, plan.T, M, K), plan.new(B, rows, M, K), plan.new(B, rows, M, dtype=torch.float32)
    args: tuple[Any, ...] = (q, k, u, do, dv, beta, gates, states, dq, dbeta, reads, writes, diagonal, from_queries)
    plan.gradient_of_queries()(*args, table)
    args = (q, k, u, dv, gates, states, dstates, reads, writes, diagonal, dk, from_keys, before_t, across)
    plan.gradient_of_keys()(*args, table)
    return dq, dk, dv, dbeta, dinitial, (from_queries, from_keys, before_t, across)


class Arguments(NamedTuple):
    """Arguments of the op, which `delta_rule` explains; the rows of k and v per row of q are the steps."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    subheads: int
    scale: float
    keep: int  # what is saved for the gradients: NOTHING, CHUNKS or ALL
    final: bool = True  # whether the final states are returned; with gradients they are

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The arguments of the plan."""
        q, documents = self.q, None if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        others = tuple(None if x is None else x.dtype for x in (self.beta, self.log_decay, self.initial_state))
        return q.shape, self.v.shape, self.subheads, self.scale, q.dtype, q.device, documents, others

    @property
    def plan(self) -> DeltaRule:
        return DeltaRule.of(self.cu_seqlens, self.q.shape[1], *self.sizes)


class Outputs(NamedTuple):
    """Results of the op, and what `differentiate` would otherwise recompute: all, some or none of it."""

    o: Tensor
    final_state: Tensor | None
    inverse: Tensor | None
    scores: Tensor | None
    gates: Tensor | None
    bounds: Tensor | None
    u: Tensor | None
    states: Tensor | None
    transition: Tensor | None
    has_transition: Tensor | None


def compute(args: Arguments) -> Outputs:
    """o, the final states and the residuals."""
    plan, keep = args.plan, args.keep
    q, k, v, beta = (x.contiguous() for x in args[:4])
    scores = not plan.scores_in_pass(kept=keep != NOTHING)
    chunks = prepared(plan, q, k, beta, args.log_decay, scores=scores)
    o = plan.new(plan.B, plan.T, plan.M, plan.V)
    final, along = run_forward(plan, q, k, v, chunks, args.initial_state, o, save=keep == ALL, wanted=args.final)
    kept = (*chunks, *along)[: KEPT[keep]]
    return Outputs(add_subheads(o, args.subheads), final, *kept, *[None] * (KEPT[ALL] - len(kept)))


def differentiate(
    args: Arguments, needed: Any, do: Tensor | None, dfinal: Tensor | None, *residuals: Tensor | None
) -> Gradients:
    """The gradients of all tensors but `cu_seqlens`."""
    plan, subheads = args.plan, args.subheads
    q, k, beta = (x.contiguous() for x in (args.q, args.k, args.beta))
    log_decay, keep = args.log_decay, args.keep
    if keep != ALL:
        chunks = tuple(residuals[:4]) if keep == CHUNKS else prepared(plan, q, k, beta, log_decay)
        along = run_forward(plan, q, k, args.v.contiguous(), chunks, args.initial_state, None, save=True)[1]
        residuals = (*chunks, *along)
    do, dfinal = (None if x is None else x.contiguous() for x in (do, dfinal))
    do = plan.new(plan.B, plan.T, plan.H, plan.V).zero_() if do is None else do
    dends = gradients_of_ends(plan, q, k, do, tuple(residuals[:4]), residuals[6], residuals[7], dfinal)
    note(next(path for path in BACKWARD if path.name == plan.backward_path))
    run = in_three_passes if plan.backward_path == "three_passes" else in_one_pass
    dq, dk, dv, dbeta, dinitial, sums = run(plan, q, k, do, beta, residuals, dends, gated=log_decay is not None)

    dlog_decay = None
    if log_decay is not None:
        dlog_decay = plan.new(plan.B, plan.T, plan.M, dtype=torch.float32)
        plan.gradient_of_log_decay(GATES[log_decay.dim()])(
            dlog_decay, log_decay.contiguous(), *sums, plan.layout.chunks
        )
        if log_decay.dim() == 1:
            dlog_decay = dlog_decay.sum((0, 1))
        dlog_decay = dlog_decay.to(log_decay.dtype)
    dq, dk = (add_heads(x, plan.R, subheads) for x in (dq, dk))
    dv = add_subheads(dv, subheads)
    dinitial = dinitial.index_select(0, plan.ends[0]) if plan.cut else dinitial
    first = None if args.initial_state is None else dinitial.to(args.initial_state.dtype).contiguous()
    return {"q": dq, "k": dk, "v": dv, "beta": dbeta.to(beta.dtype), "log_decay": dlog_decay, "initial_state": first}


def fake(args: Arguments) -> Outputs:
    """Empty tensors of the shapes and dtypes that `compute` returns."""
    plan = DeltaRule(*args.sizes)
    outputs = Outputs._make(plan.empty(plan.shapes(KEPT[args.keep])))
    return outputs if args.final else outputs._replace(final_state=None)


def unread(args: Arguments) -> Sequence[str]:
    """The values: if U is saved, the gradients do not read them."""
    return ("v",) if args.keep == ALL else ()


delta_rule = register("delta_rule", compute, differentiate, fake, results=2, unread=unread)


def forward(a: Recurrences) -> tuple[Tensor, Tensor | None]:
    """o [B,T,H,V], and the final states [N,H·E,K,V] if they are needed."""
    assert a.beta is not None
    if takes(ONE_TOKEN, a):
        return step.forward(a)
    wanted = a.differentiated
    # With subheads everything takes E times the memory, with a long head the states do. What goes first are U and the
    # states, which take three times as much as the rest.
    few = a.subheads * a.q.shape[3] <= FEW_ENOUGH
    keep = NOTHING if not wanted else ALL if a.keep_states else CHUNKS if few else NOTHING
    # fp16 lacks the range for a state, and for what a small β multiplies. Two more cases would exceed the error that
    # bf16 is allowed: a chunk of far more tokens than its keys can tell apart, and the gradient of a constant decay, a
    # sum of contributions of either sign from all steps.
    exact = a.q.dtype == torch.float16 or a.q.shape[3] <= SHORT or learned_constant(a)
    q, k, v = (x.float() if exact else x for x in (a.q, a.k, a.v))
    tensors = (q, k, v, a.beta, a.log_decay, a.initial_state, a.cu_seqlens)
    o, final = delta_rule(*tensors, a.subheads, a.scale, keep, a.final or wanted)
    return o.to(a.v.dtype), final
