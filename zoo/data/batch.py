"""What a training step receives."""

from typing import NamedTuple

from torch import Tensor

NO_LOSS = -100  # the label that PyTorch's cross entropy ignores


class Batch(NamedTuple):
    """Tokens and the tokens that follow them.

    Shapes:
        tokens: `[B, T]` int64.
        labels: `[B, T]` int64, already shifted: `labels[b, t]` follows `tokens[b, t]`; −100 = no loss.
        cu_seqlens: `[N + 1]` int32, from 0 to T, where N packed sequences start and end (then B = 1); else `None`.
    """

    tokens: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None = None
