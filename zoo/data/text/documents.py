"""The kinds of documents of a corpus."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tokens:
    """A document as tokens.

    Attributes:
        ids: [n] uint32.
    """

    ids: np.ndarray

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    def content(self) -> bytes:
        """The bytes that identify it."""
        return self.ids.astype("<u4").tobytes()


Document = str | Tokens
