"""S_t = exp(g_t)(I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, o_t = scale · S_tᵀ q_t."""

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.recurrence import Recurrences, check, one_token
from . import chunk, reference, step

WHOLE, LONGEST = 256, 2048  # largest key size whose state fits into registers; largest supported


def learned_constant(a: Recurrences) -> bool:
    """Return whether the gradient of a constant decay is needed."""
    g = a.log_decay
    return g is not None and g.dim() == 1 and g.requires_grad and torch.is_grad_enabled()


def limits(a: Recurrences) -> str | None:
    """Why the Triton kernels cannot serve a call, as a relative clause; None if they can.

    Beyond `WHOLE` it is what was run on a device.
    """
    T, K = a.q.shape[1], a.q.shape[3]
    if K <= WHOLE or (K <= LONGEST and T > 1 and a.q.dtype == torch.bfloat16 and not learned_constant(a)):
        return None
    return (
        f"which takes keys of at most {WHOLE} channels, or in bfloat16 of {LONGEST} if there is more than one token "
        "and no constant decay that is learned"
    )


def in_torch(a: Recurrences) -> tuple[Tensor, Tensor]:
    """The implementation in PyTorch: a single step, or chunks."""
    return (step if one_token(a) else chunk).forward(a)


GPU = "kernels.delta_rule.gpu.op:forward"
FLASHQLA = "kernels.delta_rule.gpu.flashqla:forward"
OP = Op("delta_rule", reference=reference.forward, torch=in_torch, gpu=GPU, limits=limits, flashqla=FLASHQLA)
ONE_TOKEN = Op("delta_rule", reference=reference.forward, torch=in_torch, gpu=GPU, limits=limits)  # FlashQLA has none


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    subheads: int = 1,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    consume_state: bool = False,
    keep_states: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run S_t = exp(g_t)(I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ and read o_t = scale · S_tᵀ q_t (arXiv 2412.06464).

    Letters: B batch, T time, H value heads, G key heads (a divisor of H), E subheads, K key size, V value size,
    N documents. There are H·E recurrences: recurrence h·E + e reads key head (h // (H/G))·E + e and value head h, and
    the outputs of the E subheads of a head are summed. The recurrence is stable for keys of unit length and β in
    [0, 2].

    Args:
        q: Queries [B,T,G·E,K].
        k: Keys, shaped as q.
        v: Values [B,T,H,V].
        beta: How much of what the state holds for the key is replaced by the value [B,T,H·E].
        log_decay: None (no decay), a constant [H·E], or per step [B,T,H·E]; ≤ 0. −inf erases the state before the token
            is written. Positive ones are refused on a CPU, undefined elsewhere.
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
    a = check(*args, per_channel=False, consume_state=consume_state, keep_states=keep_states)
    if a.beta is None:
        raise ValueError("beta: the delta rule needs it")
    o, state = (ONE_TOKEN if one_token(a) else OP)(q, a)
    return o, state if return_state else None
