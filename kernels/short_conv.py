"""Short causal depthwise convolution, with carried history and packed documents."""

from torch import Tensor

from .features import features


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    history: Tensor | None = None,
    return_history: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y_t = bias + Σ_j weight_j · x_{t−W+1+j}, for each channel separately.

    Args:
        x: Inputs [B,T,C].
        weight: Taps [C,1,W]; the last one applies to the current token.
        bias: [C], or None.
        history: The W − 1 inputs before x [B,W−1,C], or [N,W−1,C] with `cu_seqlens`; zeros by default.
        return_history: Whether to return the last W − 1 inputs.
        cu_seqlens: Boundaries [N+1] of documents packed into one row (B = 1), from 0 to T; documents may be empty.

    Returns:
        y [B,T,C] in the dtype of x, and the history for the next call, in the dtype of `history` (else of x), or None.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if x.dim() != 3:
        raise ValueError(f"x: expected [B,T,C], got shape {tuple(x.shape)}")
    y, history = features(
        x.unsqueeze(2), weight, bias, history=history, return_history=return_history, cu_seqlens=cu_seqlens
    )
    return y.squeeze(2), history
