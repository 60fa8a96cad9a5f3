"""The general delta rule in Triton, forward and backward: which kernels run, in which order, on which tensors.

Forward: `prepare` for all chunks in parallel, then `scan_forward` along time. Backward: `scan_backward` along time,
then `pairs` and `gradients` for all chunks in parallel. Contributions of several recurrences to one tensor are summed
afterwards, in a fixed order: equal inputs give equal bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....core.allocation import aligned
from ....core.autograd import Gradients, register
from ....core.recurrence import Recurrences
from ....gpu.launch import Launch, launch_in_order
from ....gpu.layout import CHUNK
from ....gpu.paths import note, takes
from ....gpu.reductions import add_heads, add_outer, add_subheads
from ..select import GENERAL, ONE_TOKEN
from . import step
from .kinds import erasing, kind_of
from .plan import GeneralDeltaRule


class Arguments(NamedTuple):
    """Arguments of the op, which `kernels.delta_rule` explains; the rows of k and v per row of q are the steps."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    erase: Tensor | None
    log_decay: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    subheads: int
    scale: float
    read_before: bool
    product: bool  # whether the erase keys are factors on k
    keep: bool  # whether all that gradients need is saved, or computed again

    @property
    def sizes(self) -> tuple[Any, ...]:
        """The arguments of the plan."""
        documents = None if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        kind = (kind_of(self.log_decay), self.read_before, self.product)
        return self.q.shape, self.v.shape, self.subheads, self.scale, *kind, self.q.dtype, self.q.device, documents

    @property
    def plan(self) -> GeneralDeltaRule:
        return GeneralDeltaRule.of(self.cu_seqlens, self.q.shape[1], *self.sizes)

    def contiguous(self) -> "Arguments":
        # kernels in Gluon copy 16 bytes at a time
        values: list[Any] = [*(None if x is None else aligned(x.contiguous()) for x in self[:7]), *self[7:]]
        return Arguments(*values)


class Outputs(NamedTuple):
    """Results of the op, and what `differentiate` would otherwise compute again."""

    o: Tensor
    final_state: Tensor
    inverse: Tensor | None
    scores: Tensor | None
    read_q: Tensor | None
    read_a: Tensor | None
    keep: Tensor | None
    total: Tensor | None
    u: Tensor | None
    states: Tensor | None


def run_forward(args: Arguments, *, outputs: bool, save: bool) -> tuple[Tensor | None, Tensor, list[Tensor]]:
    """The output of every recurrence, the final states, and what gradients need; args are contiguous."""
    plan = args.plan
    chunks = [plan.new(*shape, dtype=dtype) for shape, dtype in plan.kept[:6]]
    inputs, table = (args.q, args.k, args.erase, args.beta, args.log_decay), plan.layout.chunks
    if plan.in_gluon:
        products, (inverse, scores, *streams) = plan.products(), chunks
        launches: list[Launch] = [(plan.pair_products(), (*inputs, products, *streams, table))]
        launches.append((plan.solve_pairs(), (products, inverse, scores)))
    elif plan.per_channel:
        launches = [(plan.prepare(), (*inputs, *chunks, plan.sums(), table))]
    else:
        launches = [(plan.scalar_prepare(), (*inputs, *chunks, table))]
    o = plan.new(plan.B, plan.T, plan.M, plan.V) if outputs else None
    along = [plan.new(*shape, dtype=dtype) for shape, dtype in plan.kept[6:]] if save else [None, None]
    final = plan.states()
    results = (o, *along, final, plan.layout.segments)
    launches.append((plan.forward(), (args.v, args.beta, *chunks, args.initial_state, *results)))
    launch_in_order(launches)
    return o, final, [*chunks, *(x for x in along if x is not None)]


def compute(args: Arguments) -> Outputs:
    """o, the final states and the residuals."""
    plan, args = args.plan, args.contiguous()
    o, final, saved = run_forward(args, outputs=True, save=args.keep)
    assert o is not None
    return Outputs(add_subheads(o, args.subheads), final, *(saved if args.keep else [None] * len(plan.kept)))


def differentiate(
    args: Arguments, needed: Any, do: Tensor | None, dfinal: Tensor | None, *residuals: Tensor
) -> Gradients:
    """The gradients of all tensors but `cu_seqlens`."""
    plan = args.plan
    # tensors that are not read hold a single element; `contiguous` would expand it
    args = args._replace(**{name: getattr(args, name).as_strided((1,), (1,)) for name in unread(args)}).contiguous()
    if not args.keep:
        residuals = tuple(run_forward(args, outputs=False, save=True)[2])
    *chunks, u, states = residuals
    do, dfinal = (None if x is None else aligned(x.contiguous()) for x in (do, dfinal))
    B, T, rows, M, K, V, table = plan.B, plan.T, plan.rows, plan.M, plan.K, plan.V, plan.layout.chunks
    do = plan.new(B, T, plan.H, V).zero_() if do is None else do
    dr, dstates, dinitial = plan.new(B, rows, M, V), plan.new(*states.shape), plan.states()
    along = (do, *chunks, dfinal, dr, dstates, dinitial, plan.layout.segments)

    parts, gate = plan.key_part[1], plan.gate
    dv = dr if args.beta is None else plan.new(B, rows, M, V)
    dbeta = None if args.beta is None else plan.new(parts + 1, B, rows, M, dtype=torch.float32)
    dP, dL = plan.new(*chunks[0].shape), plan.new(*chunks[0].shape)
    diagonal = plan.new(len(states), M, CHUNK, dtype=torch.float32)
    of_values = None if dbeta is None else dbeta[parts]
    of_pairs = (args.v, args.beta, args.log_decay, do, u, dr, dv, of_values, dP, dL, diagonal, table)
    dq, dk = plan.new(B, T, M, K), plan.new(B, rows, M, K)
    derase = None if args.erase is None else plan.new(B, rows, M, K)
    shape = (B, T, M, K) if gate == "channel" else (parts, B, T, M)
    dg = None if args.log_decay is None else plan.new(*shape, dtype=torch.float32)
    inputs = (args.q, args.k, args.erase, args.beta, args.log_decay, do, u, dr, states, dstates, dP, dL, diagonal)
    gradients = (dq, dk, derase, dbeta, dg)
    launches: list[Launch] = [(plan.backward(), along), (plan.pairs(), of_pairs)]
    if plan.in_gluon:
        launches.append((plan.block_gradients(), (*inputs, *gradients, table)))
    elif plan.per_channel:
        launches.append((plan.gradients(), (*inputs, *gradients, plan.sums(), table)))
    else:
        launches.append((plan.scalar_gradients(), (*inputs, *gradients, table)))
    launch_in_order(launches)
    return _named(args, plan, dq=dq, dk=dk, dv=dv, derase=derase, dbeta=dbeta, dg=dg, dinitial=dinitial)


def _named(
    args: Arguments,
    plan: GeneralDeltaRule,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    derase: Tensor | None,
    dbeta: Tensor | None,
    dg: Tensor | None,
    dinitial: Tensor,
) -> Gradients:
    """The gradients of the arguments from those of all recurrences."""
    gradients: dict[str, Tensor | None] = {
        "q": add_heads(dq, plan.R, plan.E),
        "k": add_heads(dk, plan.R, plan.E),
        "v": add_subheads(dv, plan.E),
        "erase": derase if args.erase is None or derase is None else derase.to(args.erase.dtype),
    }
    if args.beta is not None and dbeta is not None:
        gradients["beta"] = add_outer(dbeta, args.beta.dtype)
    if args.log_decay is not None and dg is not None:
        dg = dg if plan.gate == "channel" else add_outer(dg, torch.float32)
        gradients["log_decay"] = (dg.sum((0, 1)) if plan.gate == "constant" else dg).to(args.log_decay.dtype)
    if args.initial_state is not None:
        gradients["initial_state"] = dinitial.to(args.initial_state.dtype)
    return gradients


def fake(args: Arguments) -> Outputs:
    """Empty tensors of the shapes and dtypes that `compute` returns."""
    plan = GeneralDeltaRule(*args.sizes)
    results = [((plan.B, plan.T, plan.H, plan.V), plan.dtype), ((plan.N, plan.M, plan.K, plan.V), torch.float32)]
    return Outputs._make(plan.empty([*results, *(plan.kept if args.keep else [None] * len(plan.kept))]))


def unread(args: Arguments) -> Sequence[str]:
    """Return the names of the tensors that gradients do not read."""
    return ("v",) if args.keep and args.beta is None else ()


delta_rule = register("general_delta_rule", compute, differentiate, fake, results=2, unread=unread)


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V]."""
    if takes(ONE_TOKEN, a):
        return step.forward(a)
    note(GENERAL)
    # fp16 lacks the range for a state
    exact = a.q.dtype == torch.float16 or a.q.shape[3] <= 16
    dtype = torch.float32 if exact else a.q.dtype
    q, k, v = (x.to(dtype) for x in (a.q, a.k, a.v))
    beta, erase, product = erasing(a)
    erase = None if erase is None else erase.to(dtype)
    keep = a.differentiated and a.keep_states
    g = a.log_decay
    if g is not None and g.dim() == 4 and g.dtype != torch.bfloat16:  # kernels copy decays of 2 or 4 bytes
        g = g.float()
    first = (q, k, v, beta, erase, g, a.initial_state, a.cu_seqlens)
    o, final = delta_rule(*first, a.subheads, a.scale, a.read_before, product, keep)
    return o.to(a.v.dtype), final
