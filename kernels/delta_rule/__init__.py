"""S_t = D_t S_{t−1} + k_t (v_t − X_tᵀ a_t)ᵀ, o_t = scale · S_tᵀ q_t."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.backend import Op
from ..core.recurrence import Erasing, Recurrences, check, one_token
from ..core.tensors import check_tensors
from . import chunk, chunk_general, reference, step

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


def general_limits(a: Recurrences) -> str | None:
    """Like `limits`, for the general delta rule."""
    if a.q.shape[3] <= WHOLE:
        return None
    return f"which takes keys of at most {WHOLE} channels with such erase keys or decays"


def general(a: Recurrences) -> bool:
    """Return whether a call needs more than erase keys β k, one decay per head and, in decoding, one step per token."""
    per_channel = a.log_decay is not None and a.log_decay.dim() == 4
    strength_per_channel = a.beta is not None and a.beta.dim() == 4
    steps = a.steps > 1 and one_token(a)
    return a.erase is not None or a.read_before or steps or per_channel or strength_per_channel


def in_torch(a: Recurrences) -> tuple[Tensor, Tensor]:
    """The implementation in PyTorch: a single step, or chunks."""
    return (step if one_token(a) else chunk_general if general(a) or a.steps > 1 else chunk).forward(a)


GPU = "kernels.delta_rule.gpu.op:forward"
OP = Op("delta_rule", reference=reference.forward, torch=in_torch, gpu=GPU, limits=limits)
GENERAL = Op(
    "delta_rule",
    reference=reference.forward,
    torch=in_torch,
    gpu="kernels.delta_rule.gpu.general.op:forward",
    limits=general_limits,
)


def op_of(a: Recurrences) -> Op:
    """The op that serves a call."""
    return GENERAL if general(a) else OP


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    log_decay: Tensor | None = None,
    *,
    erase: Tensor | None = None,
    erase_write: Tensor | None = None,
    read_before: bool = False,
    steps: int = 1,
    subheads: int = 1,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    consume_state: bool = False,
    keep_states: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run S_t = D_t S_{t−1} + β_t k_t (v_t − X_tᵀ a_t)ᵀ and read o_t = scale · S_tᵀ q_t, where D_t = diag(exp g_t).

    The erase key a_t, by default k_t, reads X_t = D_t S_{t−1}, or S_{t−1} with `read_before`. With one decay a head and
    no erase keys, S_t = exp(g_t)(I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ (Gated DeltaNet, arXiv 2412.06464). With a
    decay per channel and no erase keys, this is Kimi Delta Attention (arXiv 2510.26692).

    Letters: B batch, T time, H value heads, G key heads (a divisor of H), E subheads, K key size, V value size,
    N documents, n steps. There are H·E recurrences: recurrence h·E + e reads key head (h // (H/G))·E + e and value head
    h, and the outputs of the E subheads of a head are summed. Without erase keys it is stable for keys of unit length
    and β in [0, 2]. An erase key that is not a multiple of k makes the norm of a step exceed 1.

    Args:
        q: Queries [B,T,G·E,K].
        k: Keys [B,nT,G·E,K].
        v: Values [B,nT,H,V].
        beta: How much of what the state holds for the erase key is replaced by the value [B,nT,H·E]; 1 by default with
            `erase`, required without. Or a factor on each channel of k [B,nT,H·E,K], which is then the erase key, while
            the values are written as they are (Gated DeltaNet-2, arXiv 2605.22791).
        log_decay: None (no decay), a constant [H·E], or per step [B,T,H·E] or [B,T,H·E,K]; ≤ 0. −inf erases the state
            before the token is written. Positive ones are refused on a CPU, undefined elsewhere.
        erase: Erase keys a [B,nT,H·E,K]; k by default.
        erase_write: Keys [B,nT,H·E,K] that the erased value is written with, if not k (RWKV-7, arXiv 2503.14456): S_t =
            D_t S_{t−1} − β_t w_t (X_tᵀ a_t)ᵀ + β_t k_t v_tᵀ. Only with `erase`.
        read_before: Whether the erase key reads the state before it decays (Comba, arXiv 2506.02475).
        steps: Steps n per token (DeltaProduct, arXiv 2502.10297). The steps of a token follow each other on the time
            axis of k, v, beta and erase. The state decays before the first and is read after the last.
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
    check_tensors(beta=beta, erase=erase, erase_write=erase_write)
    if beta is None and erase is None:
        raise ValueError("beta: the delta rule needs beta or erase")
    if beta is not None and beta.dim() == 4 and erase is not None:
        raise ValueError("beta: one per channel makes erase keys of k, so that erase cannot be given as well")
    erasing = Erasing(erase, read_before, steps)
    options: dict[str, Any] = dict(subheads=subheads, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    options |= dict(consume_state=consume_state, keep_states=keep_states)
    checked: Callable[..., Recurrences] = partial(check, **options)
    a = checked(q, k, v, log_decay, beta, erasing=erasing)
    if erase_write is not None:
        if erase is None:
            raise ValueError("erase_write: needs erase, which it goes with")
        check_erase_write(k, erase, erase_write)
        a.erase_write = erase_write
        if not one_token(a) or a.differentiated or GENERAL.backend(q, a) != "triton":
            q, k, v, erase, steps = two_steps(q, k, v, erase, erase_write, steps, subheads)
            beta = None if beta is None else beta.repeat_interleave(2, 1)
            a = checked(q, k, v, log_decay, beta, erasing=Erasing(erase, read_before, steps))
    a.final = return_state
    o, state = op_of(a)(q, a)
    return o, state if return_state else None


def check_erase_write(k: Tensor, erase: Tensor, erase_write: Tensor) -> None:
    """Check the keys that erased values are written with against the others.

    Raises:
        ValueError: They do not fit each other.
    """
    if erase_write.shape != erase.shape:
        raise ValueError(
            f"erase_write: expected the shape of erase, {tuple(erase.shape)}, got {tuple(erase_write.shape)}"
        )
    for name, x in ("erase", erase), ("erase_write", erase_write):
        if x.dtype != k.dtype:
            raise ValueError(f"{name}: is {x.dtype}, but k is {k.dtype}; with erase_write, both have one dtype")


def two_steps(
    q: Tensor, k: Tensor, v: Tensor, erase: Tensor, erase_write: Tensor, steps: int, subheads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """q, k, v, erase and the steps per token of a recurrence that erases in one step and writes in the next."""
    heads, groups = v.shape[2], k.shape[2] // subheads
    if heads != groups:  # the keys of the first step are those of value heads
        q, k = (
            x.unflatten(2, (groups, 1, subheads)).expand(-1, -1, -1, heads // groups, -1, -1).flatten(2, 4)
            for x in (q, k)
        )
    k, v, erase = (
        torch.stack(pair, 2).flatten(1, 2)
        for pair in ((erase_write, k), (torch.zeros_like(v), v), (erase, torch.zeros_like(erase)))
    )
    return q, k, v, erase, 2 * steps
