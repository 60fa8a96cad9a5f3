"""The kinds of documents of a corpus."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tokens:
    """A document that another program has tokenised.

    Attributes:
        ids: [n] uint32.
    """

    ids: np.ndarray

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)


Document = str | Tokens
