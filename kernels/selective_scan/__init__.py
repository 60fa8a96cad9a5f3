"""h_t = exp(g_t·r) h_{t−1} + b_t x_t, y_t = c_t·h_t + s x_t, diagonal: Mamba1, and HGRN1 with a state per channel."""

from torch import Tensor

from ..core.backend import Op
from . import scan
from .arguments import check

OP = Op("selective_scan", reference=scan.reference, torch=scan.forward, gpu="kernels.selective_scan.gpu.op:forward")


def selective_scan(
    x: Tensor,
    log_decay: Tensor,
    rate: Tensor | None = None,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    skip: Tensor | None = None,
    scale_inputs: bool = False,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run h_t[d,n] = exp(log_decay_t[d]·rate[d,n]) h_{t−1}[d,n] + b_t[n] x_t[d], read y_t[d] = Σ_n c_t[n] h_t[d,n].

    With `skip`, skip[d] x_t[d] is added to y_t[d] before it is rounded.

    Letters: B batch, T time, D channels, N states per channel, S sequences (B, or the documents of `cu_seqlens`).

    Args:
        x: Inputs [B,T,D].
        log_decay: Log decay of each channel [B,T,D]; ≤ 0. (Mamba's −dt.) −inf erases the states of the channel before
            the token is written. Positive ones are refused on a CPU, undefined elsewhere.
        rate: How much faster than its channel each state decays [D,N]; ≥ 0. None for one state, at rate 1. Negative
            ones are refused on a CPU, undefined elsewhere.
        b: Input weights [B,T,N], or None for ones.
        c: Output weights [B,T,N], or [D,N] if they are constant over time, or None for ones.
        skip: Weight of the skip connection [D]; None for no such connection.
        scale_inputs: Whether −log_decay_t[d] x_t[d] is written instead of x_t[d], as in Mamba, whose steps are
            −log_decay, so it must be finite. The skip connection reads x_t[d] as before.
        initial_state: h_0 [S,D,N]; zeros by default.
        return_state: Whether to return the final states.
        cu_seqlens: Boundaries [S+1] of documents packed into one row (B = 1), from 0 to T; documents may be empty.

    Returns:
        y [B,T,D] in the dtype of x, and the final states (at least fp32) or None.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    a = check(x, log_decay, rate, b, c, initial_state, skip, cu_seqlens, scale_inputs)
    y, state = OP(x, a)
    return y, state if return_state else None
