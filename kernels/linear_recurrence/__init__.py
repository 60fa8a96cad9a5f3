"""S_t = diag(exp g_t) S_{t−1} + β_t k_t v_tᵀ, o_t = scale · S_tᵀ q_t."""

from torch import Tensor

from ..core.backend import Op
from ..core.recurrence import Recurrences, check, one_token
from . import chunk, reference, step


def in_torch(a: Recurrences) -> tuple[Tensor, Tensor]:
    """The implementation in PyTorch: a single step, or chunks."""
    return (step if one_token(a) else chunk).forward(a)


OP = Op(
    "linear_recurrence", reference=reference.forward, torch=in_torch, gpu="kernels.linear_recurrence.gpu.op:forward"
)


def linear_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    subheads: int = 1,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    consume_state: bool = False,
    keep_states: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run S_t = diag(exp g_t) S_{t−1} + β_t k_t v_tᵀ and read o_t = scale · S_tᵀ q_t.

    Letters: B batch, T time, H value heads, G key heads (a divisor of H), E subheads, K key size, V value size,
    N documents. There are H·E recurrences: recurrence h·E + e reads key head (h // (H/G))·E + e and value head h, and
    the outputs of the E subheads of a head are summed.

    Args:
        q: Queries [B,T,G·E,K].
        k: Keys, shaped as q.
        v: Values [B,T,H,V].
        log_decay: None (no decay), a constant [H·E], per step [B,T,H·E], or per step and key channel [B,T,H·E,K]; ≤ 0.
            −inf erases the state before the token is written. Positive ones are refused on a CPU, undefined elsewhere.
        beta: Input gates [B,T,H·E]; None for ones.
        subheads: Subheads E per head.
        scale: Factor on the output; K^-½ by default.
        initial_state: S_0 [B,H·E,K,V], or [N,…] with `cu_seqlens`; zeros by default.
        return_state: Whether to return the final states.
        cu_seqlens: Boundaries [N+1] of documents packed into one row (B = 1), from 0 to T; documents may be empty.
        consume_state: Whether a single step (T = 1) may write the final states into `initial_state`, which saves a
            copy; the contents of `initial_state` are undefined afterwards. Ignored if a gradient is needed.
        keep_states: Whether the Triton kernels keep the states before all chunks for the backward pass, in place of
            computing them again; by default where a head's keys, in all subheads, have few channels. Equal results.

    Returns:
        o [B,T,H,V] in the dtype of v, and the final states (shaped as `initial_state`, at least fp32) or None.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    args = (q, k, v, log_decay, beta, subheads, scale, initial_state, cu_seqlens)
    a = check(*args, consume_state=consume_state, keep_states=keep_states)
    o, state = OP(v, a)
    return o, state if return_state else None
