"""One token of the (gated) delta rule in one launch, with the state in place, as in decoding. It has no gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.autograd import NAMESPACE, plain
from ...core.recurrence import Recurrences
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.overlap import wait

VALUES = 32  # columns of the blocks in which the state streams through registers


@triton.jit(do_not_specialize=["q_row", "q_head", "k_row", "k_head", "v_row", "v_head", "H", "E", "R"])
def advance(
    q,
    k,
    v,
    beta,
    log_decay,
    state,
    o,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    H,
    E,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    c = (tl.program_id(0) % BLOCKS) * BV + tl.arange(0, BV)
    row, h = tl.program_id(0) // BLOCKS // H, tl.program_id(0) // BLOCKS % H
    r = tl.arange(0, BK)
    values = tl.load(v + row.to(tl.int64) * v_row + h * v_head + c, mask=c < V, other=0.0).to(tl.float32)
    out = tl.zeros([BV], tl.float32)
    for e in tl.range(0, E):
        m = h * E + e
        n = row * H * E + m
        head = (h // R) * E + e
        key = tl.load(k + row.to(tl.int64) * k_row + head * k_head + r, mask=r < K, other=0.0).to(tl.float32)
        query = tl.load(q + row.to(tl.int64) * q_row + head * q_head + r, mask=r < K, other=0.0).to(tl.float32)
        at = n.to(tl.int64) * (K * V) + r[:, None] * V + c[None, :]
        inside = (r < K)[:, None] & (c < V)[None, :]
        S = tl.load(state + at, mask=inside, other=0.0)
        if GATE == "constant":
            S *= tl.exp(tl.load(log_decay + m).to(tl.float32))
        elif GATE == "per step":
            S *= tl.exp(tl.load(log_decay + n).to(tl.float32))
        update = tl.load(beta + n).to(tl.float32) * (values - tl.sum(key[:, None] * S, 0))
        S += key[:, None] * update[None, :]
        tl.store(state + at, S, mask=inside)
        out += tl.sum(query[:, None] * S, 0)
    tl.store(o + (row * H + h).to(tl.int64) * V + c, (out * scale).to(o.dtype.element_ty), mask=c < V)


def update(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor, subheads: int, scale: float
) -> Tensor:
    """o [B,1,H,V]; `state` [B,H·E,K,V], fp32 and contiguous, is updated in place."""
    (B, _, heads, K), (H, V) = q.shape, v.shape[2:]
    o = v.new_empty(B, 1, H, V)
    gate = "none" if log_decay is None else "constant" if log_decay.dim() == 1 else "per step"
    gates = (beta.contiguous(), None if log_decay is None else log_decay.contiguous())
    strides = (x.stride(axis) for x in (q, k, v) for axis in (0, 2))
    sizes = (H, subheads, H // (heads // subheads))
    constants = (K, V, next_power_of_2(K), VALUES, gate)
    args = (q, k, v, *gates, state, o, scale, *strides, *sizes, *constants)
    enqueue(advance, B * H * cdiv(V, VALUES), *args, overlap=True)
    return o


_op = torch.library.custom_op(f"{NAMESPACE}::delta_rule_step", update, mutates_args={"state"})
_op.register_fake(lambda q, k, v, *rest: v.new_empty(v.shape))


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,1,H,V] and the next states [B,H·E,K,V], for T = 1 without packed documents."""
    assert a.beta is not None
    state = a.own_state()
    tensors = (a.q, a.k, a.v, a.beta, a.log_decay, state)
    return (update if plain(tensors) else _op)(*tensors, a.subheads, a.scale), state
