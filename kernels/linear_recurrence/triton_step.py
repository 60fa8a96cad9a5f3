"""One token of the linear recurrence in one launch: every state is read once and written once."""

# kernels: what looks like a function is a program, and branches are taken when it is compiled
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import launch
from ..op import register


@triton.jit(do_not_specialize=["H", "groups"])
def advance(
    q,  # [B,·,K], as k
    k,
    v,  # [B,H,V]
    log_decay,  # [heads], [B,heads] or [B,heads,K]
    beta,  # [B,heads]
    before,  # [B,heads,K,V]
    out,  # [B,H,V]
    after,
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
    FIRST: tl.constexpr,
):
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    cv = tl.program_id(0) * BV + tl.arange(0, BV)
    at_v = b.to(tl.int64) * v_row + h * v_head
    Vv = tl.load(v + at_v + cv, mask=cv < V, other=0.0).to(tl.float32)
    o = tl.zeros([BV], tl.float32)
    for e in range(0, SUBHEADS):
        n = h * SUBHEADS + e
        own = (b * H * SUBHEADS + n).to(tl.int64)  # of tensors [B,heads,…]
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
            S = Kk[:, None] * written[None, :]
            if FIRST:
                kept = tl.load(before + tile, mask=inside, other=0.0)
                if GATE == "constant":
                    kept *= tl.exp(tl.load(log_decay + n))
                if GATE == "head":
                    kept *= tl.exp(tl.load(log_decay + own))
                if GATE == "channel":
                    kept *= tl.exp(tl.load(log_decay + own * K + ck, mask=in_key, other=0.0))[:, None]
                S += kept
            tl.store(after + tile, S, mask=inside)
            o += tl.sum(Q[:, None] * S, 0)
    tl.store(out + (b * H + h).to(tl.int64) * V + cv, (o * scale).to(out.dtype.element_ty), mask=cv < V)


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    subheads: int,
) -> tuple[Tensor, Tensor]:
    B, _, H, V = v.shape
    K, heads = q.shape[3], H * subheads
    o = torch.empty((B, 1, H, V), device=v.device, dtype=v.dtype)
    after = torch.empty((B, heads, K, V), device=v.device, dtype=torch.float32)
    gate = "none" if log_decay is None else {1: "constant", 3: "head", 4: "channel"}[log_decay.dim()]
    entry = launch("step", max(K, V), v.dtype, v.device)
    keys, values = (min(entry.block, triton.next_power_of_2(size)) for size in (K, V))
    with torch.cuda.device_of(v):
        advance[(triton.cdiv(V, values), B * H)](
            q,
            k,
            v,
            log_decay if log_decay is not None else o,
            beta if beta is not None else o,
            initial_state if initial_state is not None else after,
            o,
            after,
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
            FIRST=initial_state is not None,
            num_warps=entry.warps,
            num_stages=entry.stages,
        )
    return o, after


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    scale: float,
    subheads: int,
) -> tuple[Tensor, Tensor]:
    state = (v.shape[0], v.shape[2] * subheads, q.shape[3], v.shape[3])
    return v.new_empty(v.shape), v.new_empty(state, dtype=torch.float32)


step = register("linear_recurrence_step", _step, None, _fake, results=2)
