"""The selective scan in Triton: what is launched, in which order, on which tensors.

Forward: the states at the cuts between chunks, which are all that is kept, then all chunks at once. Backward: the
gradients of these states, then all chunks at once. A sequence that is one chunk, as a decoded token is, takes one
launch. There are no atomics: equal inputs give equal bits.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import op
from ..enqueue import cdiv, enqueue, next_power_of_2
from .arguments import Scan
from .triton_chunks import combine, local, outputs
from .triton_gradients import gradients

SHORT, LONG = 64, 256  # tokens of a chunk
FROM = 8192  # tokens, from which on even long chunks are enough to fill a device, and short ones are many to combine
PART = 16  # tokens whose states lie in memory at once, as their gradients are computed
CHANNELS = 64  # at most, that one warp holds the states of
ELEMENTS, GRADIENT_ELEMENTS = 1024, 512  # of such a tile; the gradients need several at once


def chunk_length(tokens: int) -> int:
    """Tokens of a chunk, in a row of so many."""
    return SHORT if tokens < FROM else LONG


class Call:
    """The sizes of one call and its launches: S sequences, which lie in `slots` chunks."""

    def __init__(self, x: Tensor, rate: Tensor, b: Tensor | None, c: Tensor | None, cu_seqlens: Tensor | None):
        (self.B, self.T, self.D), self.N = x.shape, rate.shape[1]
        self.dtype, self.device, self.cu_seqlens = x.dtype, x.device, cu_seqlens
        self.length = chunk_length(self.T)
        self.S = self.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        per_row = -(-self.T // self.length)
        self.whole = cu_seqlens is None and per_row == 1  # every sequence is one chunk
        self.slots = self.B * per_row if cu_seqlens is None else self.T // self.length + self.S
        self.has_b = b is not None
        self.read = "ones" if c is None else "constant" if c.dim() == 2 else "each"

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """y, the final states, and the states before all chunks where these are not the given ones."""
        y, final = self.new(self.B, self.T, self.D, dtype=self.dtype), self.new(self.S, self.D, self.N)
        return y, final, self.new(0) if self.whole else self.states()

    def states(self) -> Tensor:
        """A state for each chunk."""
        return self.new(self.slots, self.D, self.N)

    def tile(self, elements: int) -> tuple[int, int]:
        """Channels and states of a tile."""
        states = next_power_of_2(self.N)
        return max(1, min(CHANNELS, elements // states)), states

    def run(self, kernel: Any, rows: int, *given: Any, **constants: Any) -> None:
        """A program for each row of states and block of channels."""
        BD, BN = self.tile(GRADIENT_ELEMENTS if kernel is gradients else ELEMENTS)
        constants |= {"D": self.D, "N": self.N, "BD": BD, "BN": BN, "PACKED": self.cu_seqlens is not None}
        enqueue(kernel, (rows * cdiv(self.D, BD),), *given, **constants, num_warps=1)

    def over_chunks(self, kernel: Any, *given: Any, rest: tuple[int, ...] = (), **constants: Any) -> None:
        sizes = (self.cu_seqlens, self.T, self.length, self.S, *rest)
        self.run(kernel, self.slots, *given, *sizes, **constants, INPUT=self.has_b, READ=self.read)

    def cuts(
        self,
        x: Tensor,
        arguments: tuple[Tensor | None, ...],
        states: Tensor,
        end: Tensor | None,
        other: Tensor,
        *,
        reverse: bool,
    ) -> None:
        """Fills the states before all chunks and the final ones, or in reverse the gradients after and of the first."""
        totals = self.new(self.slots, self.D)
        self.over_chunks(local, x, *arguments, states, totals, REVERSE=reverse)
        given = (arguments[1], states, totals, end, other, self.cu_seqlens, self.T, self.length)
        self.run(combine, self.S, *given, GIVEN=end is not None, REVERSE=reverse)


def dense(*tensors: Tensor | None) -> list[Any]:
    """The tensors without gaps."""
    return [None if x is None else x.contiguous() for x in tensors]


def compute(
    x: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the final states, and the states before all chunks."""
    call = Call(x, rate, b, c, cu_seqlens)
    x, *arguments, initial = dense(x, log_decay, rate, b, c, initial_state)
    y, final, states = call.results()
    if not call.whole:
        call.cuts(x, tuple(arguments), states, initial, final, reverse=False)
    first = initial if call.whole else states
    given = (x, *arguments, first, y, final)
    call.over_chunks(outputs, *given, GIVEN=first is not None, FINAL=call.whole)
    return y, final, states


def fake(
    x: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes of `compute`."""
    return Call(x, rate, b, c, cu_seqlens).results()


def differentiate(
    arriving: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    needed: Sequence[bool],
    x: Tensor,
    log_decay: Tensor,
    rate: Tensor,
    b: Tensor | None,
    c: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> list[Tensor | None]:
    """The gradients of all tensors; there is none for `cu_seqlens`."""
    call = Call(x, rate, b, c, cu_seqlens)
    x, *arguments, initial, dy, dfinal = dense(x, log_decay, rate, b, c, initial_state, *arriving)
    dy = torch.zeros_like(x) if dy is None else dy
    first, after = (initial, dfinal) if call.whole else (kept[0], call.states())
    dinitial = call.new(call.S, call.D, call.N)
    if not call.whole:
        call.cuts(dy, tuple(arguments), after, dfinal, dinitial, reverse=True)
    BD, BN = call.tile(GRADIENT_ELEMENTS)
    blocks, marks, tokens = cdiv(call.D, BD), cdiv(call.length, PART), call.B * call.T
    scratch = call.new(call.slots * blocks, PART + marks, BN, BD)
    dx, dlog_decay = call.new(*x.shape, dtype=x.dtype), call.new(*log_decay.shape, dtype=log_decay.dtype)
    drate = call.states() if needed[2] else None
    db = None if b is None else call.new(blocks, *b.shape)
    dc = None if c is None else call.states() if c.dim() == 2 else call.new(blocks, *c.shape)
    given = (first, after, dy, scratch, dx, dlog_decay, drate, db, dc, dinitial)
    flags: dict[str, Any] = {
        "GIVEN": first is not None,
        "AFTER": after is not None,
        "RATE": drate is not None,
        "INITIAL": call.whole,
    }
    call.over_chunks(gradients, x, *arguments, *given, rest=(tokens, marks), PART=PART, **flags)
    summed = [None if g is None or z is None else g.sum(0).to(z.dtype) for g, z in ((drate, rate), (db, b), (dc, c))]
    last = None if initial_state is None else dinitial.to(initial_state.dtype)
    return [dx, dlog_decay, *summed, last, None]


selective_scan = op.register("selective_scan", compute, differentiate, fake, results=2)


def forward(a: Scan) -> tuple[Tensor, Tensor]:
    """y [B,T,D] and the final states [S,D,N]."""
    # fp64 beside an x of less: the kernels compute in fp32
    rest = (None if z is None else z.float() if z.dtype == torch.float64 else z for z in a.others)
    y, final = selective_scan(a.x, *rest, a.cu_seqlens)
    return y, final
