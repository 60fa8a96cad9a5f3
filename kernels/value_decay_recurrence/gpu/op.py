"""The recurrence with a decay per value channel on a GPU.

For gradients d of its outputs, the loss Σ_{j ≤ i} (q_i·k_j) Σ_c d_ic v_jc exp(b_ic − b_jc) is symmetric in (q, k) and
(d, v). So the linear recurrence with queries d, keys v and values k computes its gradients: the output of that
recurrence is the gradient of q, and its backward pass from the output gradient q computes the others.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...core.allocation import new
from ...core.autograd import Gradients, plain, register
from ...core.recurrence import Recurrences, one_token
from ...gpu.launch import enqueue, next_power_of_2
from ...gpu.launch_table import largest
from ...gpu.overlap import wait
from ...gpu.paths import first_match
from ...gpu.rows import load
from ...linear_recurrence.gpu import op as exchanged
from ...linear_recurrence.gpu.select import GLUON_SIZE, PATHS, Case
from .. import step
from .outputs import outputs

SLICE = 32  # rows of the state per program; half as many if keys have more than LONG channels
LONG = 128
TOKEN_TILE = 2048  # numbers of a state that a program of one token has


@triton.jit
def advance(
    q, k, v,  # [B,1,H,K], [B,1,H,K] and [B,1,H,V], with any strides of rows and heads
    log_decay,  # [B,1,H,V]
    state,  # [B,H,V,K], which becomes the next one
    o,  # [B,1,H,V]
    scale, q_row, q_head, k_row, k_head, v_row, v_head, H,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token, for ROWS rows of a state."""
    BLOCKS: tl.constexpr = (V + ROWS - 1) // ROWS
    n = (tl.program_id(0) // BLOCKS).to(tl.int64)
    b, h = n // H, n % H
    r, c = tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS), tl.arange(0, BK)
    at, inside = (n * V + r[:, None]) * K + c[None, :], (r < V)[:, None] & (c < K)[None, :]
    wait(OVERLAP)
    key, query = load(k, b * k_row + h * k_head + c, c < K), load(q, b * q_row + h * q_head + c, c < K)
    value, decay = load(v, b * v_row + h * v_head + r, r < V), tl.exp(load(log_decay, n * V + r, r < V))
    S = load(state, at, inside) * decay[:, None] + value[:, None] * key[None, :]
    tl.store(state + at, S, mask=inside)
    tl.store(o + n * V + r, tl.sum(S * query[None, :], 1) * scale, mask=r < V)


def one_step(a: Recurrences, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return o [B,1,H,V] and the next states [B,H,V,K] of one token without gradients."""
    assert a.log_decay is not None
    state, o = a.own_state(), new(a.k, dtype=torch.float32)
    (B, _, H, K), V = q.shape, o.shape[3]
    columns = next_power_of_2(K)
    rows = max(1, min(next_power_of_2(V), TOKEN_TILE // columns))
    streams = [x if x.stride(3) == 1 else x.contiguous() for x in (q, a.v, a.k)]
    strides = [x.stride(axis) for x in streams for axis in (0, 2)]
    tensors = (*streams, a.log_decay.contiguous(), state, o)
    sizes = {"K": K, "V": V, "BK": columns, "ROWS": rows}
    enqueue(advance, B * H * -(-V // rows), *tensors, a.scale, *strides, H, **sizes, overlap=True)
    return o, state


class Arguments(NamedTuple):
    """Arguments of the op, all contiguous."""

    q: Tensor  # [B,T,H,K]
    k: Tensor
    v: Tensor  # [B,T,H,V]
    log_decay: Tensor  # [B,T,H,V], in fp32
    initial_state: Tensor | None  # [N,H,V,K], in fp32
    cu_seqlens: Tensor | None
    scale: float


def empty(args: Arguments) -> tuple[Tensor, Tensor]:
    """Return uninitialised results."""
    (B, _, H, K), V = args.q.shape, args.v.shape[3]
    sequences = B if args.cu_seqlens is None else args.cu_seqlens.shape[0] - 1
    return new(args.v, dtype=torch.float32), new(args.v, sequences, H, V, K, dtype=torch.float32)


def compute(args: Arguments) -> tuple[Tensor, Tensor]:
    """Return o and the final states."""
    o, last = empty(args)
    (_, T, H, K), V, wide = args.q.shape, args.v.shape[3], args.q.dtype == torch.float32
    block = min(SLICE if K <= LONG else SLICE // 2, max(16, next_power_of_2(V)))
    enqueue(
        outputs,
        len(last) * H * -(-V // block),
        *args[:6],
        *(o, last, T, args.scale),
        heads=H,
        K=K,
        V=V,
        BK=max(16, next_power_of_2(K)),
        BV=block,
        WIDE=wide,
        PRECISION="tf32x3" if wide else "tf32",
        warps=8 if K > 64 or wide else 4,  # four warps spill registers
        stages=1,
    )
    return o, last


def differentiate(args: Arguments, needed: Any, o_grad: Tensor | None, state_grad: Tensor | None) -> Gradients:
    """Return the gradients of all tensors except `cu_seqlens`."""
    q, k, v, log_decay, state, cu_seqlens, scale = args
    queries = torch.zeros_like(v) if o_grad is None else o_grad.to(v.dtype).contiguous()
    parts = _parts(args)
    q, k = (x.unflatten(3, (parts, -1)).flatten(2, 3) for x in (q, k))
    decays = log_decay if parts == 1 else log_decay.repeat_interleave(parts, 2)
    first, last_grad = (None if x is None else _cut(x, parts) for x in (state, state_grad))
    call = exchanged.Arguments(queries, v, k, decays, None, first, cu_seqlens, scale, subheads=1, keep=True)
    o, _, *residuals = exchanged.compute(call)
    learned = SimpleNamespace(log_decay=needed.log_decay, beta=False, initial_state=needed.initial_state)
    gradients = exchanged.differentiate(call, learned, q, last_grad, *residuals)
    dk, dg, dfirst = (gradients[name] for name in ("v", "log_decay", "initial_state"))
    dg = dg if dg is None or parts == 1 else dg.unflatten(2, (-1, parts)).sum(3)
    if dfirst is not None:
        dfirst = dfirst.unflatten(1, (-1, parts)).transpose(2, 3).flatten(3)
    assert dk is not None
    dq, dk = o.view(args.q.shape), dk.view(args.k.shape)
    return {"q": dq, "k": dk, "v": gradients["k"], "log_decay": dg, "initial_state": dfirst}


def _parts(args: Arguments) -> int:
    """The number of parts of 128 channels that keys are cut into, each a head for the one pass of the gradients."""
    K, V = args.k.shape[3], args.v.shape[3]
    case = Case("channel", False, V, GLUON_SIZE, args.v.dtype, args.v.device)
    one_pass = K % GLUON_SIZE == 0 and first_match(PATHS, case).name == "hopper_vector_decay"
    return K // GLUON_SIZE if one_pass else 1


def _cut(state: Tensor, parts: int) -> Tensor:
    """States [N,H,V,K] as [N,H·parts,V,K/parts]."""
    return state.unflatten(3, (parts, -1)).transpose(2, 3).flatten(1, 2).contiguous()


recurrence = register("value_decay_recurrence", compute, differentiate, empty, results=2)


def forward(a: Recurrences, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return o [B,T,H,V] and the final states [N,H,V,K]; `a.k` holds the values, and `a.v` the keys."""
    if one_token(a):
        differentiated = a.differentiated or (q.requires_grad and torch.is_grad_enabled())
        return (one_step if plain((q, a.k)) and not differentiated else step.forward)(a, q)
    k, v, g, state = a.v, a.k, a.log_decay, a.initial_state
    assert g is not None
    if q.is_cpu:  # Triton's interpreter gets bf16 arithmetic wrong
        q, k, v = q.float(), k.float(), v.float()
    largest_size = largest("linear_recurrence", q.dtype, q.device)
    (K, keys), (V, values) = (exchanged.equal_parts(size, largest_size, q.dtype) for size in (q.shape[3], v.shape[3]))
    more_keys, more_values = K - q.shape[3], V - v.shape[3]
    if more_keys or more_values:  # padding with zeros, which changes no result
        q, k = F.pad(q, (0, more_keys)), F.pad(k, (0, more_keys))
        v, g = F.pad(v, (0, more_values)), F.pad(g, (0, more_values))
        state = None if state is None else F.pad(state, (0, more_keys, 0, more_values))
    H, cut = q.shape[2], keys * values > 1
    if cut:  # each pair of a key block and a value block becomes a head
        q, k = (x.unflatten(3, (1, keys, -1)).expand(-1, -1, -1, values, -1, -1).flatten(2, 4) for x in (q, k))
        v, g = (x.unflatten(3, (values, 1, -1)).expand(-1, -1, -1, -1, keys, -1).flatten(2, 4) for x in (v, g))
        if state is not None:
            state = state.unflatten(3, (keys, -1)).unflatten(2, (values, -1)).transpose(3, 4).flatten(1, 3)
    tensors = q.contiguous(), k.contiguous(), v.contiguous(), g.float().contiguous()
    state = None if state is None else state.float().contiguous()
    cu_seqlens = None if a.cu_seqlens is None else a.cu_seqlens.contiguous()
    o, last = recurrence(*tensors, state, cu_seqlens, a.scale)
    if cut:
        o = o.unflatten(2, (H, values, keys)).sum(4).flatten(3)
        last = last.unflatten(1, (H, values, keys)).transpose(3, 4).flatten(4).flatten(2, 3)
    if more_keys or more_values:
        o, last = o[..., : V - more_values], last[..., : V - more_values, : K - more_keys]
    return o, last
