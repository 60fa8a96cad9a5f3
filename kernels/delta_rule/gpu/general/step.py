"""One token of the general delta rule in one launch, with the state in place, as in decoding. It has no gradient."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....core.autograd import NAMESPACE, plain
from ....core.recurrence import Recurrences
from ....gpu.launch import cdiv, enqueue, next_power_of_2
from ....gpu.overlap import wait
from .kinds import erasing, kind_of

VALUES = 32  # columns of the blocks in which the state streams through registers


@triton.jit(do_not_specialize=["H", "G"])
def advance(
    q,  # [B,1,G·E,K]
    k,  # [B,n,G·E,K]
    v,  # [B,n,H,V]
    beta,  # [B,n,H·E], or None
    erase,  # [B,n,H·E,K], or with PRODUCT factors on the keys; None if they are the keys
    erase_write,  # [B,n,H·E,K]; None if they are the keys
    log_decay,
    state,
    o,
    scale,
    H,
    G,
    E: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    BEFORE: tl.constexpr,
    PRODUCT: tl.constexpr,
    STEPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait(OVERLAP)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    c = (tl.program_id(0) % BLOCKS) * BV + tl.arange(0, BV)
    sequence, h = (tl.program_id(0) // BLOCKS // H).to(tl.int64), tl.program_id(0) // BLOCKS % H
    r = tl.arange(0, BK)
    out = tl.zeros([BV], tl.float32)
    inside = (r < K)[:, None] & (c < V)[None, :]
    for e in tl.range(0, E):
        m = h * E + e
        head = (h // (H // G)) * E + e
        n = sequence * H * E + m
        at = n * (K * V) + r[:, None] * V + c[None, :]
        S = tl.load(state + at, mask=inside, other=0.0)
        if GATE == "constant":
            decay = tl.full([BK], 1.0, tl.float32) * tl.exp(tl.load(log_decay + m).to(tl.float32))
        elif GATE == "head":
            decay = tl.full([BK], 1.0, tl.float32) * tl.exp(tl.load(log_decay + n).to(tl.float32))
        elif GATE == "channel":
            decay = tl.exp(tl.load(log_decay + n * K + r, mask=r < K, other=0.0).to(tl.float32))
        else:
            decay = tl.full([BK], 1.0, tl.float32)
        for i in tl.static_range(STEPS):
            row = sequence * STEPS + i
            key = tl.load(k + (row * G * E + head) * K + r, mask=r < K, other=0.0).to(tl.float32)
            values = tl.load(v + (row * H + h) * V + c, mask=c < V, other=0.0).to(tl.float32)
            if erase is None:
                erased = key
            else:
                erased = tl.load(erase + (row * H * E + m) * K + r, mask=r < K, other=0.0).to(tl.float32)
                if PRODUCT:
                    erased *= key
            if beta is not None:
                strength = tl.load(beta + row * H * E + m).to(tl.float32)
                erased, values = erased * strength, values * strength
            if i == 0:
                if BEFORE:
                    seen = tl.sum(erased[:, None] * S, 0)
                    S *= decay[:, None]
                else:
                    S *= decay[:, None]
                    seen = tl.sum(erased[:, None] * S, 0)
            else:
                seen = tl.sum(erased[:, None] * S, 0)
            if erase_write is None:
                S += key[:, None] * (values - seen)[None, :]
            else:
                written = tl.load(erase_write + (row * H * E + m) * K + r, mask=r < K, other=0.0).to(tl.float32)
                S += key[:, None] * values[None, :] - written[:, None] * seen[None, :]
        tl.store(state + at, S, mask=inside)
        query = tl.load(q + (sequence * G * E + head) * K + r, mask=r < K, other=0.0).to(tl.float32)
        out += tl.sum(query[:, None] * S, 0)
    tl.store(o + (sequence * H + h) * V + c, (out * scale).to(o.dtype.element_ty), mask=c < V)


def update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    erase: Tensor | None,
    erase_write: Tensor | None,
    log_decay: Tensor | None,
    state: Tensor,
    subheads: int,
    scale: float,
    read_before: bool,
    product: bool,
) -> Tensor:
    """o [B,1,H,V]; `state` [B,H·E,K,V], fp32 and contiguous, is updated in place."""
    (B, _, heads, K), (H, V) = q.shape, v.shape[2:]
    o = v.new_empty(B, 1, H, V)
    tensors = (None if x is None else x.contiguous() for x in (q, k, v, beta, erase, erase_write, log_decay))
    options = (kind_of(log_decay), read_before, product, k.shape[1])
    constants = (subheads, K, V, next_power_of_2(K), VALUES, *options)
    programs = B * H * cdiv(V, VALUES)
    enqueue(advance, programs, *tensors, state, o, scale, H, heads // subheads, *constants, overlap=True)
    return o


_op = torch.library.custom_op(f"{NAMESPACE}::general_delta_rule_step", update, mutates_args={"state"})
_op.register_fake(lambda q, k, v, *rest: v.new_empty(v.shape[0], 1, *v.shape[2:]))


def forward(a: Recurrences) -> tuple[Tensor, Tensor]:
    """o [B,1,H,V] and the next states [B,H·E,K,V], for T = 1 without packed documents."""
    state = a.own_state()
    beta, erase, product = erasing(a)
    tensors = (a.q, a.k, a.v, beta, erase, a.erase_write, a.log_decay, state)
    return (update if plain(tensors) else _op)(*tensors, a.subheads, a.scale, a.read_before, product), state
