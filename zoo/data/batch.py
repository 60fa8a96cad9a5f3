"""The input of a training step."""

from typing import NamedTuple

from torch import Tensor

NO_LOSS = -100  # the label that PyTorch's cross entropy ignores


class Batch(NamedTuple):
    """Tokens and their labels, the tokens that follow them; or other sequences and their classes.

    Shapes:
        tokens: `[B, T]` int64; `[B, T, values]` float32 if they are patches of images.
        labels: `[B, T]` int64, already shifted: `labels[b, t]` follows `tokens[b, t]`; −100 has no loss. To classify
            sequences `[B, 1]`, or `[1, N]` if N are packed.
        cu_seqlens: `[N + 1]` int32, boundaries of N packed sequences from 0 to T (then B = 1); `None` if not packed.
    """

    tokens: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None = None
