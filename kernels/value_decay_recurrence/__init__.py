"""A recurrence with a decay per value channel: S_t = diag(exp g_t) S_{t−1} + v_t k_tᵀ, o_t = scale · S_t q_t."""

from torch import Tensor

from ..core.backend import Op
from ..core.recurrence import Recurrences, check, one_token
from ..core.tensors import check_tensors
from . import chunk, reference, step


def in_torch(a: Recurrences, q: Tensor) -> tuple[Tensor, Tensor]:
    """Run the implementation in PyTorch: a single step, or chunks."""
    return (step if one_token(a) else chunk).forward(a, q)


OP = Op(
    "value_decay_recurrence",
    reference=reference.forward,
    torch=in_torch,
    gpu="kernels.value_decay_recurrence.gpu.op:forward",
)


def value_decay_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    consume_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Run S_t = diag(exp g_t) S_{t−1} + v_t k_tᵀ and read o_t = scale · S_t q_t.

    It is `linear_recurrence` with the decay on the values instead of the keys: o_t = scale · Σ_{s≤t} (q_t·k_s)
    exp(g_{s+1} + … + g_t) ⊙ v_s. As there, the decayed axis of the state is the first, so a decay scales rows.

    Args:
        q: Queries [B,T,H,K].
        k: Keys, shaped as q.
        v: Values [B,T,H,V].
        log_decay: g ≤ 0 per step and value channel, shaped as v. −inf erases the channel before the token is written.
            Positive values raise an error on a CPU; on a GPU their results are undefined.
        scale: Factor on the output; K^-½ by default.
        initial_state: S_0 [B,H,V,K], or [N,…] with `cu_seqlens`; zeros by default.
        return_state: Whether to return the final states.
        cu_seqlens: Boundaries [N+1] of documents packed into one row (B = 1), from 0 to T; documents may be empty.
        consume_state: Whether a single step (T = 1) may write the final states into `initial_state`, whose contents are
            undefined afterwards. Ignored if a gradient is needed.

    Returns:
        o [B,T,H,V] and the final states (shaped as `initial_state`) or None, both at least fp32.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    check_tensors(q=q, k=k, v=v, log_decay=log_decay, initial_state=initial_state, cu_seqlens=cu_seqlens)
    if q.dim() != 4:
        raise ValueError(f"q: expected [B,T,H,K], got shape {tuple(q.shape)}")
    if k.shape != q.shape:
        raise ValueError(f"k: expected the shape of q, {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.dim() != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"v: expected {[*q.shape[:3]]} and a value axis, got shape {tuple(v.shape)}")
    if log_decay.shape != v.shape:
        raise ValueError(f"log_decay: expected the shape of v, {tuple(v.shape)}, got {tuple(log_decay.shape)}")
    for name, x in {"q": q, "k": k, "v": v}.items():
        if not x.is_floating_point() or x.dtype != q.dtype:
            raise ValueError(f"{name}: is {x.dtype}; q, k and v must have one floating dtype")
        if x.device != q.device:
            raise ValueError(f"{name}: is on {x.device}, but q is on {q.device}")
        if name != "q" and x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name}: the last axis must be contiguous, its stride is {x.stride(-1)}")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    # `check` expects the decay on the key channels, so keys and values are exchanged
    exchanged = (v, v, k, log_decay, None, 1, scale, initial_state, cu_seqlens)
    a = check(*exchanged, consume_state=consume_state)
    a.consume_state = a.consume_state and not q.requires_grad
    o, state = OP(v, a, q)
    return o, state if return_state else None
