"""Short causal depthwise convolution, with carried history and packed documents."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .documents import documents


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    history: Tensor | None = None,
    return_history: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y_t = bias + Σ_j weight_j · x_{t−W+1+j}, each channel by itself.

    Args:
        x: Inputs [B,T,C].
        weight: Kernels [C,1,W]; the last tap meets the current token.
        bias: [C], or None.
        history: The W − 1 inputs before x [B,W−1,C], or [N,W−1,C] with `cu_seqlens`; zeros by default.
        return_history: Whether to return the last W − 1 inputs.
        cu_seqlens: Boundaries [N+1] of documents packed into one row (B = 1), from 0 to T; documents may be empty.

    Returns:
        y [B,T,C] in the dtype of x, and the history to continue with, in the dtype of the one given, or None.

    Raises:
        ValueError: An argument does not fit the others; the message starts with its name.
    """
    if x.dim() != 3:
        raise ValueError(f"x: expected [B,T,C], got shape {tuple(x.shape)}")
    B, T, C = x.shape
    if weight.dim() != 3 or weight.shape[:2] != (C, 1):
        raise ValueError(f"weight: expected [{C},1,W], got shape {tuple(weight.shape)}")
    if bias is not None and bias.shape != (C,):
        raise ValueError(f"bias: expected [{C}], got shape {tuple(bias.shape)}")
    W = weight.shape[2]
    docs = documents(cu_seqlens, T, B, x.device) if cu_seqlens is not None else None
    rows = len(docs.spans) if docs else B
    if history is not None and tuple(history.shape) != (rows, W - 1, C):
        raise ValueError(f"history: expected [{rows},{W - 1},{C}], got shape {tuple(history.shape)}")
    kind = x.dtype if history is None else history.dtype
    past = x.new_zeros(rows, W - 1, C) if history is None else history.to(x.dtype)

    if docs is None:
        line = torch.cat([past, x], 1)
        y, tail = _convolve(line, weight, bias), line[:, T:]
    else:
        # one line of all documents, each behind its own history, so that no tap reaches into another
        bounds = torch.tensor(docs.bounds, device=x.device)
        ahead = torch.arange(rows, device=x.device) * (W - 1)
        taps = torch.arange(W - 1, device=x.device)
        token = torch.arange(T, device=x.device) + ahead[docs.owner]
        line = x.new_zeros(T + rows * (W - 1), C).index_copy(0, token + W - 1, x[0])
        line = line.index_copy(0, ((bounds[:-1] + ahead)[:, None] + taps).flatten(), past.flatten(0, 1))
        y = _convolve(line[None], weight, bias)[:, token]
        tail = line[(bounds[1:] + ahead)[:, None] + taps]
    return y, tail.to(kind) if return_history else None


def _convolve(line: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[B,W−1+T,C] → [B,T,C]. As a picture of one row with channels last: three times faster on CPUs than conv1d."""
    weight, bias = weight.to(line.dtype), None if bias is None else bias.to(line.dtype)
    if line.dtype == torch.float64 and not line.is_cuda:
        # PyTorch opens a parallel region per channel here: seconds on a busy machine
        T = line.shape[1] - weight.shape[2] + 1
        y = sum((line[:, j : j + T] * weight[:, 0, j] for j in range(weight.shape[2])), line.new_zeros(()))
        return y if bias is None else y + bias
    y = F.conv2d(line.mT.unsqueeze(2), weight.unsqueeze(2), bias, groups=line.shape[2])
    return y.squeeze(2).mT.contiguous()
