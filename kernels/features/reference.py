"""Features token by token, in at least fp32."""

import torch
from torch import Tensor

from ..core.documents import documents
from ..core.recurrence import at_least_fp32
from .arguments import FeatureStream
from .stages import ACTIVATIONS, NORMS


def forward(stream: FeatureStream) -> tuple[Tensor, Tensor | None]:
    """y [B,T,heads,size], and the history for the next call if it is to be returned."""
    x, T = at_least_fp32(stream.x.flatten(2)), stream.x.shape[1]
    spans = [(b, 0, T) for b in range(len(x))]
    if stream.cu_seqlens is not None:
        spans = [(0, i, j) for i, j in documents(stream.cu_seqlens, T, len(x), x.device).spans]
    pasts = at_least_fp32(stream.past() if stream.history is None else stream.history)
    outputs, tails = [], []
    for (row, start, stop), past in zip(spans, pasts, strict=True):
        for t in range(start, stop):
            window = torch.cat([past, x[row, t : t + 1]])
            outputs.append(_one(window, stream))
            past = window[1:]
        tails.append(past)
    y = torch.stack(outputs).view_as(stream.x).to(stream.x.dtype)
    dtype = stream.x.dtype if stream.history is None else stream.history.dtype
    return y, torch.stack(tails).to(dtype) if stream.return_history else None


def _one(window: Tensor, stream: FeatureStream) -> Tensor:
    """The features [heads,size] of the last of W inputs [W,C]."""
    z = window[-1]
    if stream.weight is not None:
        z = (at_least_fp32(stream.weight)[:, 0].T * window).sum(0)
        z = z if stream.bias is None else z + at_least_fp32(stream.bias)
    return NORMS[stream.norm](ACTIVATIONS[stream.activation](z.view(stream.x.shape[2:])))
