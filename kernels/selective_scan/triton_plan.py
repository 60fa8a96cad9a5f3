"""The selective scan in Triton: what follows from the sizes of a call, and all of its launches."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..documents import Documents
from ..triton.enqueue import Prepared, cdiv, next_power_of_2
from ..triton.layout import Layout, layout
from ..triton.plan import Plan, prepared
from .triton_chunks import combine, local, outputs
from .triton_gradients import gradients

SHORT, LONG = 64, 256  # tokens of a chunk
FROM = 8192  # tokens, from which on even long chunks are enough to fill a device, and short ones are many to combine
PART = 16  # tokens whose states lie in memory at once, as their gradients are computed
CHANNELS = 64  # at most, that one warp holds the states of
ELEMENTS, GRADIENT_ELEMENTS = 1024, 512  # of such a tile; the gradients need several at once


class SelectiveScan(Plan):
    """The plan of a call over S sequences, whose chunks take at most `slots` places.

    Args:
        packed: The documents that are packed into one row, if any are.
        shape: [B,T,D] of x.
        states: N of a channel.
        read: ones, constant or each: what c is.
        dtype: Of x.
        device: Where it lies.
        documents: How many are packed, if any are; known where `packed` is not, in compiled code.
    """

    def __init__(
        self,
        packed: Documents | None,
        shape: torch.Size,
        states: int,
        read: str,
        dtype: torch.dtype,
        device: torch.device,
        documents: int | None,
    ):
        super().__init__(packed, dtype, device)
        (self.B, self.T, self.D), self.N, self.read = shape, states, read
        self.length = chunk_length(self.T)
        self.per_row = -(-self.T // self.length)
        self.whole = documents is None and self.per_row == 1  # every sequence is one chunk
        self.S = self.B if documents is None else documents
        self.slots = self.B * self.per_row if documents is None else self.T // self.length + documents

    @cached_property
    def layout(self) -> Layout:
        """Where chunks lie; segments are whole sequences."""
        return layout(self.packed, self.B, self.T, self.length, self.length, self.per_row * self.length, self.device)

    @cached_property
    def chunks(self) -> int:
        """How many there are."""
        return self.layout.chunks.shape[0]

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """y, the final states, and the states before all chunks where these are not the given ones."""
        y, final = self.new(self.B, self.T, self.D), self.states(self.S)
        return y, final, self.states(0 if self.whole else self.slots)

    def states(self, count: int) -> Tensor:
        """So many states."""
        return self.new(count, self.D, self.N, dtype=torch.float32)

    def tile(self, elements: int) -> tuple[int, int]:
        """Channels and states of a tile."""
        states = next_power_of_2(self.N)
        return max(1, min(CHANNELS, elements // states)), states

    def _prepared(self, kernel: Any, rows: int, elements: int, *numbers: int, **constants: Any) -> Prepared:
        """A program for each row of states and block of channels."""
        BD, BN = self.tile(elements)
        sizes: dict[str, Any] = {"D": self.D, "N": self.N, "BD": BD, "BN": BN}
        return Prepared(kernel, (rows * cdiv(self.D, BD),), *numbers, **sizes, **constants, num_warps=1)

    @prepared
    def local(self, reverse: bool) -> Prepared:
        """What each chunk adds to the state after it, or the gradient before it."""
        return self._prepared(local, self.chunks, ELEMENTS, READ=self.read, REVERSE=reverse)

    @prepared
    def combine(self, reverse: bool) -> Prepared:
        """From that to the states before all chunks, or the gradients after them."""
        return self._prepared(combine, self.S, ELEMENTS, self.length, REVERSE=reverse)

    @prepared
    def outputs(self) -> Prepared:
        """y from the states before all chunks."""
        return self._prepared(outputs, self.chunks, ELEMENTS, READ=self.read)

    @property
    def marks(self) -> int:
        """Parts of a chunk."""
        return cdiv(self.length, PART)

    @prepared
    def gradients(self) -> Prepared:
        """Of everything, from the states before all chunks and the gradients after them."""
        numbers = self.B * self.T, self.marks
        return self._prepared(gradients, self.chunks, GRADIENT_ELEMENTS, *numbers, PART=PART, READ=self.read)


def chunk_length(tokens: int) -> int:
    """Tokens of a chunk, in a row of so many."""
    return SHORT if tokens < FROM else LONG
