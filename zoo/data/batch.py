"""The input of a training step."""

from typing import NamedTuple

from torch import Tensor

NO_LOSS = -100  # the label that PyTorch's cross entropy ignores


class Batch(NamedTuple):
    """Tokens and their labels, the tokens that follow them.

    Data of other kinds has patches of images `[B, T, values]` float32 in place of tokens, and one label for each
    sequence that is to be classified, `[B, 1]`, or `[1, N]` of N packed sequences.

    Shapes:
        tokens: `[B, T]` int64.
        labels: `[B, T]` int64, already shifted: `labels[b, t]` follows `tokens[b, t]`; −100 has no loss.
        cu_seqlens: `[N + 1]` int32, boundaries of N packed sequences from 0 to T (then B = 1); `None` if not packed.
    """

    tokens: Tensor
    labels: Tensor
    cu_seqlens: Tensor | None = None
