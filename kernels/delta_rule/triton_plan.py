"""The (gated) delta rule in Triton: what follows from the sizes of a call, and all of its launches."""

from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..documents import Documents
from ..triton.enqueue import Prepared, cdiv, next_power_of_2
from ..triton.launches import Launch, launch, multiprocessors, optional
from ..triton.layout import CHUNK, Layout, layout
from ..triton.plan import Plan, prepared
from .triton_gradients import gradient_of_keys, gradient_of_log_decay, gradient_of_queries
from .triton_prepare import prepare
from .triton_scan import combine, scan_backward, scan_forward

THIRD = 168  # registers of a thread with which three programs of four warps share a multiprocessor
FEWEST_CHUNKS, FEWEST_SEGMENTS = 16, 6
Shapes = list[tuple[tuple[int, ...], torch.dtype]]
INTERPRETED = triton.knobs.runtime.interpret


class DeltaRule(Plan):
    """The plan of a call: M = H·E recurrences over N sequences, whose chunks take at most `slots` places.

    Args:
        packed: The documents that are packed into one row, if any are.
        q: Shape of the queries [B,T,G·E,K].
        v: Shape of the values [B,T,H,V].
        subheads: E.
        scale: Factor of the output.
        dtype: Of q, k and v.
        device: Where they lie.
        documents: How many are packed, if any are; known where `packed` is not, in compiled code.
    """

    def __init__(
        self,
        packed: Documents | None,
        q: torch.Size,
        v: torch.Size,
        subheads: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
        documents: int | None,
    ):
        super().__init__(packed, dtype, device)
        (self.B, self.T, heads, self.K), (self.H, self.V), self.E = q, v[2:], subheads
        self.G = heads // subheads
        self.R, self.M = self.H // self.G, self.H * subheads
        self.scale = scale
        chunks = -(-self.T // CHUNK)
        if documents is None:
            self.N, self.slots, together = self.B, self.B * chunks, chunks
        else:  # what is known of them without their boundaries
            self.N, self.slots = documents, self.T // CHUNK + documents
            together = self.slots
        # Of sequences that are cut: chunks of a segment, and how many segments there are at most.
        rows = self.B if documents is None else 1
        count = segments(self.entry("forward"), rows * self.M, self.V, together, device)
        self.segment = -(-together // count)
        self.most = 0 if count == 1 else rows * count if documents is None else 2 * count

    @cached_property
    def layout(self) -> Layout:
        """Where chunks and segments lie."""
        segment = self.segment
        if self.packed and max(stop - start for start, stop in self.packed.spans) < FEWEST_SEGMENTS * segment * CHUNK:
            segment = -(-self.T // CHUNK)  # the longest document would not be over much sooner
        return layout(self.packed, self.B, self.T, CHUNK, CHUNK, segment * CHUNK, self.device)

    @cached_property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The first and the last segment of each sequence."""
        first, count = self.layout.sequences.unbind(1)
        return first, first + count - 1

    @cached_property
    def cut(self) -> int:
        """How many segments are less than a sequence."""
        return self.layout.cut

    @cached_property
    def kept(self) -> Shapes:
        """Of inverse, scores and gates of all chunks, and of what the pass along time keeps."""
        B, T, V, M, K, slots = self.B, self.T, self.V, self.M, self.K, self.slots
        pairs = ((slots, M, CHUNK, CHUNK), self.dtype)
        of_chunks: Shapes = [pairs, pairs, ((slots, M, 4, CHUNK), torch.float32)]
        states, transition = ((slots, M, K, V), self.dtype), ((self.most, M, K, K), torch.float32)
        return [*of_chunks, ((B, T, M, V), self.dtype), states, transition]

    def shapes(self, keep: bool) -> Shapes:
        """Of the outputs of the op: o, the final states, and what the backward pass needs."""
        results: Shapes = [
            ((self.B, self.T, self.H, self.V), self.dtype),
            ((self.N, self.M, self.K, self.V), torch.float32),
        ]
        return results + (self.kept if keep else [((0,), dtype) for _, dtype in self.kept])

    def states(self) -> Tensor:
        """A state for each segment."""
        return self.new(self.layout.segments.shape[0], self.M, self.K, self.V, dtype=torch.float32)

    def entry(self, kernel: str) -> Launch:
        """How a kernel is launched."""
        return launch(f"delta_rule.{kernel}", max(self.K, self.V), self.dtype, self.device)

    def pass_entry(self, kernel: str) -> Launch:
        """How a pass along time is."""
        wide = self.entry(kernel)
        narrow = optional("delta_rule.narrow", max(self.K, self.V), self.dtype, self.device)
        return wide if self.cut else whole(wide, narrow, self.N * self.M, self.V, self.device)

    def blocks(self, kernel: str) -> tuple[int, int, int]:
        """Blocks of keys and of values, and how many of keys there are."""
        entry = self.entry(kernel)
        keys = min(entry.keys, key_block(self.K))
        return keys, min(entry.values, block(self.V)), cdiv(self.K, keys)

    def registers(self, entry: Launch) -> int | None:
        """So few for a thread that three programs fit, for a few spills; the compiler would take 195 to 242."""
        return THIRD if self.dtype == torch.bfloat16 and entry.warps == 4 else None

    def _prepared(self, kernel: Any, entry: Launch, programs: int, **constants: Any) -> Prepared:
        exact = self.dtype == torch.float32
        # in the interpreter any arithmetic on bf16 is wrong: what is loaded becomes fp32 at once
        kind = tl.float32 if exact or INTERPRETED else tl.bfloat16
        precision = "tf32x3" if exact and not INTERPRETED else "ieee"
        sizes: dict[str, Any] = {
            "M": self.M,
            "E": self.E,
            "R": self.R,
            "K": self.K,
            "DTYPE": kind,
            "PRECISION": precision,
        }
        warps, stages = entry.warps, entry.stages
        return Prepared(kernel, (programs,), self.scale, **sizes, **constants, num_warps=warps, num_stages=stages)

    @prepared
    def prepare(self, gate: str) -> Prepared:
        """Inverse, scores and gates: a program for each chunk and recurrence."""
        entry, chunks = self.entry("prepare"), self.layout.chunks.shape[0]
        merge = "ieee" if INTERPRETED else "tf32x3" if self.dtype == torch.float32 else "tf32"
        constants = {"BK": min(entry.keys, key_block(self.K)), "GATE": gate, "MERGE": merge}
        return self._prepared(prepare, entry, chunks * self.M, **constants, maxnreg=self.registers(entry))

    def _along_time(self, kernel: Any, entry: Launch, segments: int, V: int) -> Prepared:
        """A program for each segment and recurrence, and each block of values."""
        BV = min(entry.values, block(V))
        sizes = {"V": V, "BK": key_block(self.K), "STAGES": entry.stages, "BV": BV}
        return self._prepared(kernel, entry, segments * self.M * cdiv(V, BV), **sizes)

    @prepared
    def forward(self, segments: int, columns: int) -> Prepared:
        """The pass along time, over the first segments, with states of so many columns."""
        return self._along_time(scan_forward, self.pass_entry("forward"), segments, columns)

    @prepared
    def backward(self, segments: int) -> Prepared:
        """The same of the gradients, in reverse."""
        return self._along_time(scan_backward, self.pass_entry("backward"), segments, self.V)

    @prepared
    def combine(self, reverse: bool) -> Prepared:
        """From what segments do to a state to the states before all of them, or the gradients after them."""
        BV, precision = 16, "ieee" if INTERPRETED else "tf32x3"
        constants: dict[str, Any] = {
            "K": self.K,
            "V": self.V,
            "BK": 64,
            "BV": BV,
            "REVERSE": reverse,
            "PRECISION": precision,
        }
        return Prepared(combine, (self.N * self.M * cdiv(self.V, BV),), self.M, **constants, num_warps=4)

    def _over_chunks(self, kernel: Any, name: str, **constants: Any) -> Prepared:
        """A program for each chunk, recurrence and block of keys."""
        entry, (keys, values, parts) = self.entry(name), self.blocks(name)
        sizes = {"V": self.V, "BK": keys, "BV": values, "STAGES": entry.stages}
        return self._prepared(kernel, entry, self.layout.chunks.shape[0] * self.M * parts, **sizes, **constants)

    @prepared
    def gradient_of_queries(self) -> Prepared:
        """Also of β."""
        return self._over_chunks(gradient_of_queries, "dq")

    @prepared
    def gradient_of_keys(self) -> Prepared:
        """Of the keys."""
        return self._over_chunks(gradient_of_keys, "dk", maxnreg=self.registers(self.entry("dk")))

    @prepared
    def gradient_of_log_decay(self) -> Prepared:
        """Of the decays: a program for each chunk and recurrence."""
        parts: dict[str, Any] = {"QUERY_PARTS": self.blocks("dq")[2], "KEY_PARTS": self.blocks("dk")[2]}
        programs = self.layout.chunks.shape[0] * self.M
        return Prepared(gradient_of_log_decay, (programs,), self.M, **parts, num_warps=1)


def segments(wide: Launch, recurrences: int, V: int, chunks: int, device: torch.device) -> int:
    """Into how many segments the passes along time cut each sequence, to keep the device busy.

    Segments cost two more passes, so that a few of them gain nothing, and short ones do not either.
    """
    count = min(_room(wide, recurrences, V, device), chunks // FEWEST_CHUNKS)
    # all of them have a chunk
    return -(-chunks // -(-chunks // count)) if count >= FEWEST_SEGMENTS else 1


def whole(wide: Launch, narrow: Launch | None, recurrences: int, V: int, device: torch.device) -> Launch:
    """The launch of a pass over sequences that are not cut."""
    return narrow if narrow and _room(wide, recurrences, V, device) > 1 else wide


def _room(wide: Launch, recurrences: int, V: int, device: torch.device) -> int:
    """How many times the device holds the programs of a pass."""
    return multiprocessors(device) // (recurrences * -(-V // wide.values))


def block(size: int) -> int:
    """The block that holds a whole axis: matrix products need a power of two from 16."""
    return max(16, next_power_of_2(size))


def key_block(size: int) -> int:
    """The same for keys. Blocks of 16 and 32 beside 64 values give wrong gradients on Hopper with triton 3.6."""
    return max(64, block(size))
