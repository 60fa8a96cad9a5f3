"""One token of the linear recurrence in one launch: every state is read once, and updated in place."""

# Triton kernels: untyped, with branches that are resolved at compile time
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.autograd import NAMESPACE, plain
from ...core.recurrence import Recurrences
from ...gpu.launch import cdiv, enqueue, next_power_of_2
from ...gpu.launch_table import launch
from ...gpu.overlap import wait
from ...gpu.tiles import pair_of


@triton.jit(do_not_specialize=["H", "groups"])
def advance(
    q,  # [B,·,K], like k
    k,
    v,  # [B,H,V]
    log_decay,  # [heads], [B,heads] or [B,heads,K]
    beta,  # [B,heads]
    state,  # [B,heads,K,V]
    out,  # [B,H,V]
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    H,
    groups,
    SUBHEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    block, head = pair_of((V + BV - 1) // BV)
    b, h = head // H, head % H
    cv = block * BV + tl.arange(0, BV)
    at_v = b.to(tl.int64) * v_row + h * v_head
    Vv = tl.load(v + at_v + cv, mask=cv < V, other=0.0).to(tl.float32)
    o = tl.zeros([BV], tl.float32)
    for e in range(0, SUBHEADS):
        n = h * SUBHEADS + e
        own = (b * H * SUBHEADS + n).to(tl.int64)  # index in tensors [B,heads,…]
        key_head = (h // groups) * SUBHEADS + e
        written = Vv
        if BETA:
            written = Vv * tl.load(beta + own)
        for first in range(0, K, BK):
            ck = first + tl.arange(0, BK)
            in_key = ck < K
            tile = own * (K * V) + ck[:, None] * V + cv[None, :]
            inside = in_key[:, None] & (cv < V)[None, :]
            at_q, at_k = b.to(tl.int64) * q_row + key_head * q_head, b.to(tl.int64) * k_row + key_head * k_head
            Q = tl.load(q + at_q + ck, mask=in_key, other=0.0).to(tl.float32)
            Kk = tl.load(k + at_k + ck, mask=in_key, other=0.0).to(tl.float32)
            S = tl.load(state + tile, mask=inside, other=0.0)
            if GATE == "constant":
                S *= tl.exp(tl.load(log_decay + n))
            if GATE == "head":
                S *= tl.exp(tl.load(log_decay + own))
            if GATE == "channel":
                S *= tl.exp(tl.load(log_decay + own * K + ck, mask=in_key, other=0.0))[:, None]
            S += Kk[:, None] * written[None, :]
            tl.store(state + tile, S, mask=inside)
            o += tl.sum(Q[:, None] * S, 0)
    tl.store(out + (b * H + h).to(tl.int64) * V + cv, (o * scale).to(out.dtype.element_ty), mask=cv < V)


def update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    scale: float,
    subheads: int,
) -> Tensor:
    """o [B,1,H,V]; `state` [B,H·E,K,V], fp32 and contiguous, is updated in place. Gates are fp32 and contiguous."""
    B, _, H, V = v.shape
    K, heads = q.shape[3], H * subheads
    o = torch.empty((B, 1, H, V), device=v.device, dtype=v.dtype)
    gate = "none" if log_decay is None else {1: "constant", 3: "head", 4: "channel"}[log_decay.dim()]
    entry = launch("linear_recurrence.step", max(K, V), v.dtype, v.device)
    keys, values = (min(entry.block, next_power_of_2(size)) for size in (K, V))
    enqueue(
        advance,
        cdiv(V, values) * B * H,
        q,
        k,
        v,
        log_decay if log_decay is not None else o,
        beta if beta is not None else o,
        state,
        o,
        scale,
        q.stride(0),
        q.stride(2),
        k.stride(0),
        k.stride(2),
        v.stride(0),
        v.stride(2),
        H,
        heads // q.shape[2],
        SUBHEADS=subheads,
        K=K,
        V=V,
        BK=keys,
        BV=values,
        GATE=gate,
        BETA=beta is not None,
        warps=entry.warps,
        stages=entry.stages,
        overlap=True,
    )
    return o


_op = torch.library.custom_op(f"{NAMESPACE}::linear_recurrence_step", update, mutates_args={"state"})
_op.register_fake(lambda q, k, v, *rest: v.new_empty(v.shape))


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,1,H,V] and the next states [B,H·E,K,V], for T = 1 without packed documents."""
    q, k, v = a.q, a.k, a.v
    if q.is_cpu:  # Triton's interpreter gets bf16 arithmetic wrong
        q, k, v = q.float(), k.float(), v.float()
    log_decay, beta = (None if x is None else x.float().contiguous() for x in (a.log_decay, a.beta))
    state = a.own_state()
    tensors = (q, k, v, log_decay, beta, state)
    o = (update if plain(tensors) else _op)(*tensors, a.scale, a.subheads)
    return o.to(a.v.dtype), state
