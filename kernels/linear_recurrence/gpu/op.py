"""The linear recurrence on a GPU, forward and backward; `select.py` has the kernel paths.

Where the programs of all recurrences do not fill the device, sequences are cut into segments: the states that segments
start from come from a pass without output and a scan over the segments, and are saved for the backward pass, except
with packed documents, whose number of cuts does not follow from shapes. Otherwise the arguments are all that is saved,
or, where one pass does everything, the states before all chunks if they are to be kept. There are no atomics: results
are bitwise repeatable.

Results per recurrence are summed over the subheads of a head (o, dv) or the value heads of a key head (dq, dk) at the
end, in tensors of the inputs' dtype.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.autograd import Gradients, register
from ...core.recurrence import Recurrences
from ...gpu.launch_table import largest
from ...gpu.layout import most_chunks
from ...gpu.paths import first_match, select, takes
from ...gpu.reductions import add_heads, add_subheads
from . import step
from .call import Arguments, Call, Saved, Wanted
from .multi_pass import MultiPass
from .one_pass import OnePass
from .plan import LinearRecurrence, Shape, ends_of_chunks, filling, gate_of, segment_length, states_of_chunks
from .select import GLUON_SIZE, ONE_TOKEN, PATHS, Case


class Outputs(NamedTuple):
    """Results of the op, and what is saved for the backward pass; what is not needed is None."""

    o: Tensor
    final_state: Tensor
    first: Tensor | None  # the states that segments start from
    states: Tensor | None  # the states before all chunks
    ends: Tensor | None  # the sums of decays in them


def call_of(args: Arguments, grad: Tensor | None = None, *, gate_gradients: bool = False) -> Call:
    """The call on the kernel path for these arguments."""
    q, k, v, log_decay, beta = args[:5]
    layout = q.shape, q.stride(), k.stride(), v.shape, v.stride(), q.dtype, q.device
    dtype = torch.float32 if log_decay is None else log_decay.dtype
    how = gate_of(log_decay), beta is not None, args.scale, args.subheads, grad is not None, gate_gradients, dtype
    plan = LinearRecurrence.of(args.cu_seqlens, q.shape[1], *layout, *how)
    return (OnePass if plan.path == "hopper_vector_decay" else MultiPass)(plan, args, grad)


def compute(args: Arguments) -> Outputs:
    """o, the final states and the residuals."""
    call = call_of(args)
    plan = call.plan
    o, final = plan.per_token(plan.V), plan.states()
    first = call.starts(args.initial_state, final)
    saved = call.output(o, first, final, keep=args.keep)
    if args.cu_seqlens is None and plan.segmented and saved.states is None:
        saved = saved._replace(first=first)
    return Outputs(add_subheads(o, args.subheads), final, *saved)


def fake(args: Arguments) -> Outputs:
    """Empty tensors of the shapes and dtypes that `compute` returns."""
    q, v, heads = args.q, args.v, args.v.shape[2] * args.subheads
    (B, T, _, K), V, packed = q.shape, v.shape[3], args.cu_seqlens is not None
    documents = B if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    case = Case(gate_of(args.log_decay), args.beta is not None, K, V, v.dtype, v.device)
    one_pass = select(PATHS, case).name == "hopper_vector_decay"
    first: Shape | None = None
    states: Shape | None = None
    ends: Shape | None = None
    if args.keep and one_pass:
        slots = most_chunks(B, T, documents if packed else None)
        states, ends = states_of_chunks(slots, heads, K, V), ends_of_chunks(slots, heads, K)
    elif not packed:
        length = segment_length(q.shape, v.shape, args.subheads, filling(heads, K, V, v.dtype, v.device, one_pass))
        segments = B * -(-T // length)
        first = (segments, heads, K, V) if segments > B else None
    shapes, dtypes = (first, states, ends), (torch.float32, v.dtype, torch.float32)
    residuals = (
        None if shape is None else v.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    return Outputs(v.new_empty(v.shape), v.new_empty((documents, heads, K, V), dtype=torch.float32), *residuals)


def differentiate(
    args: Arguments, needed: Any, o_grad: Tensor | None, state_grad: Tensor | None, *residuals: Tensor | None
) -> Gradients:
    """The gradients of all tensors but `cu_seqlens`."""
    grad = torch.zeros_like(args.v) if o_grad is None else o_grad.contiguous()
    state_grad = None if state_grad is None else state_grad.contiguous()
    wanted = Wanted(args.log_decay is not None and needed.log_decay, args.beta is not None and needed.beta)
    call = call_of(args, grad, gate_gradients=any(wanted))
    first_grad = call.plan.states() if args.initial_state is not None and needed.initial_state else None
    saved = Saved(*(None if x is None or x.numel() == 0 else x for x in residuals))
    if saved.first is None and saved.states is None:
        saved = saved._replace(first=call.starts(args.initial_state, None))
    last = call.starts(state_grad, first_grad, reverse=True)
    of_inputs = call.gradients(saved, last, first_grad, wanted)
    groups, subheads = call.plan.groups, args.subheads
    return {
        "q": add_heads(of_inputs.q, groups, subheads),
        "k": add_heads(of_inputs.k, groups, subheads),
        "v": of_inputs.v,
        "log_decay": of_inputs.log_decay,
        "beta": of_inputs.beta,
        "initial_state": first_grad,
    }


recurrence = register("linear_recurrence", compute, differentiate, fake, results=2)


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,T,H,V] and the final states [N,H·E,K,V]."""
    if takes(ONE_TOKEN, a):
        return step.forward(a)
    q, k, v, E = a.q, a.k, a.v, a.subheads
    if q.is_cpu:  # Triton's interpreter gets bf16 arithmetic wrong
        q, k, v = q.float(), k.float(), v.float()
    largest_size = largest("linear_recurrence", q.dtype, q.device)
    K, keys = equal_parts(q.shape[3], GLUON_SIZE, q.dtype)
    case = Case(gate_of(a.log_decay), a.beta is not None, K // keys, GLUON_SIZE, q.dtype, q.device)
    # one pass takes less time than several even where it reads keys in parts, and values of 64 channels with 64 zeros
    one_pass = 2 * v.shape[3] >= GLUON_SIZE and first_match(PATHS, case).name == "hopper_vector_decay"
    if one_pass:
        values = -(-v.shape[3] // GLUON_SIZE)
        V = values * GLUON_SIZE
    else:
        (K, keys), (V, values) = (equal_parts(x.shape[3], largest_size, q.dtype) for x in (q, v))
    g = a.log_decay
    if g is not None:  # one pass takes decays in bf16, all others in fp32
        narrow = one_pass and g.dtype == torch.bfloat16 and v.shape[1] > 1
        g = (g if narrow else g.float()).contiguous()
    beta = None if a.beta is None else a.beta.float().contiguous()
    state = None if a.initial_state is None else a.initial_state.float().contiguous()
    more_keys, more_values = K - q.shape[3], V - v.shape[3]
    if more_keys or more_values:  # channels of zeros, which change nothing
        q, k, v = F.pad(q, (0, more_keys)), F.pad(k, (0, more_keys)), F.pad(v, (0, more_values))
        g = F.pad(g, (0, more_keys)) if g is not None and g.dim() == 4 else g
        state = None if state is None else F.pad(state, (0, more_values, 0, more_keys))
    if keys > 1:  # blocks of a long key become subheads under one gate
        q, k = (x.unflatten(3, (keys, -1)).flatten(2, 3) for x in (q, k))
        if g is not None:
            g = g.unflatten(3, (keys, -1)).flatten(2, 3) if g.dim() == 4 else g.repeat_interleave(keys, -1)
        beta = None if beta is None else beta.repeat_interleave(keys, -1)
        state = None if state is None else state.unflatten(2, (keys, -1)).flatten(1, 2)
    if values > 1:  # blocks of a long value become heads under one gate
        v = v.unflatten(3, (values, -1)).flatten(2, 3)
        g, beta = (None if x is None else _repeat_heads(x, E * keys, values) for x in (g, beta))
        if state is not None:
            state = state.unflatten(3, (values, -1)).unflatten(1, (-1, E * keys))
            state = state.permute(0, 1, 4, 2, 3, 5).flatten(1, 3).contiguous()
    keep = a.keep_states and a.differentiated
    o, final = recurrence(q, k, v, g, beta, state, a.cu_seqlens, a.scale, E * keys, keep)
    if values > 1:
        o = o.unflatten(2, (-1, values)).flatten(3)
        final = final.unflatten(1, (-1, values, E * keys)).permute(0, 1, 3, 4, 2, 5).flatten(4).flatten(1, 2)
    if keys > 1:
        final = final.unflatten(1, (-1, keys)).flatten(2, 3)
    if more_keys or more_values:
        o, final = o[..., : V - more_values], final[..., : K - more_keys, : V - more_values]
    return o.to(a.v.dtype), final


def equal_parts(size: int, largest: int, dtype: torch.dtype) -> tuple[int, int]:
    """The number of channels of a head, and of equal parts of at most `largest` that it is cut into.

    The number of channels grows by a few where otherwise more than twice as many parts as necessary would be equal, and
    to whole blocks.
    """
    fewest = -(-size // largest)
    parts = next((n for n in range(fewest, 2 * fewest + 1) if size % n == 0), fewest)
    return parts * _whole(-(-size // parts), dtype), parts


def _whole(part: int, dtype: torch.dtype) -> int:
    """The channels of a part, up to whole blocks of 16, or of 32 above 128, in half precision.

    With Triton 3.6 on Hopper and a decay per head, parts of 200 channels had wrong results and of 132 illegal accesses:
    their slices of 32 are masked, and their rows are not aligned. Whole slices are right, and so are aligned rows.
    """
    block = 1 if dtype.itemsize > 2 else 16 if part <= 128 else 32
    return -(-part // block) * block


def _repeat_heads(x: Tensor, subheads: int, times: int) -> Tensor:
    """Gates [H·E] or [B,T,H·E,…] with every head repeated, its subheads kept together."""
    dim = 0 if x.dim() == 1 else 2
    return x.unflatten(dim, (-1, subheads)).repeat_interleave(times, dim).flatten(dim, dim + 1)
