"""The (gated) delta rule in Triton: the sizes, the layout and the launches of a call."""

from functools import cached_property
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...core.documents import Documents
from ...gpu.device import multiprocessors
from ...gpu.launch import LaunchSpec, cdiv, next_power_of_2
from ...gpu.launch_table import LaunchConfig, launch, optional
from ...gpu.layout import CHUNK, layout, most_chunks
from ...gpu.paths import first_match, select, takes
from ...gpu.plan import Plan, prepared
from ...gpu.tiles import INTERPRETED
from .. import WHOLE
from .chunk_gradients import gradient_of_keys, gradient_of_log_decay, gradient_of_queries
from .prepare import prepare
from .select import BACKWARD, FORWARD, PREPARE, SCORES, SEQUENTIAL, Case
from .sequential_pass import combine, scan_backward, scan_forward
from .sequential_pass_long import long_backward, long_forward

THIRD, FOURTH = 168, 128  # registers per thread at which as many programs of four warps fit on a multiprocessor
FEWEST_CHUNKS, FEWEST_SEGMENTS = 16, 6
FEWEST_OF_LONGEST = 3  # packed documents are cut if the longest has as many segments
Shapes = list[tuple[tuple[int, ...], torch.dtype] | None]


class DeltaRule(Plan):
    """The plan of a call: M = H·E recurrences over N sequences, which have at most `slots` chunks.

    Args:
        q: Shape of the queries [B,T,G·E,K].
        v: Shape of the values [B,nT,H,V], with n rows per token.
        subheads: Subheads E per head.
        scale: Factor on the output.
        dtype: Dtype of q, k and v.
        device: Device of q, k and v.
        documents: Number of documents packed into one row; None without packing.
        others: Dtypes of β, the log decay and the first states. A plan has one of each, so that launches need not look
            at the dtypes of their tensors.
    """

    def __init__(
        self,
        q: torch.Size,
        v: torch.Size,
        subheads: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
        documents: int | None,
        others: tuple[torch.dtype | None, ...] = (),
    ):
        super().__init__(dtype, device)
        (self.B, self.T, heads, self.K), (self.rows, self.H, self.V), self.E = q, v[1:], subheads
        self.steps = self.rows // self.T
        self.G = heads // subheads
        self.R, self.M = self.H // self.G, self.H * subheads
        # what launches are chosen by; no program holds more than a block of values, however many there are
        self.size = max(self.K, min(self.V, WHOLE))
        self.long = self.K > WHOLE
        self.scale, self.documents = scale, documents
        chunks = -(-self.rows // CHUNK)
        self.N, self.slots = self.B if documents is None else documents, most_chunks(self.B, self.rows, documents)
        self.many = self.B  # sequences that launches are chosen by
        # If sequences are cut: chunks per segment, and the largest possible number of segments.
        rows = self.B if documents is None else 1
        # a batch may be empty
        count = 1 if self.long or self.deterministic else segments(self._room(max(1, rows) * self.M), chunks)
        self.segment = -(-chunks // count)
        self.most = 0 if count == 1 else rows * count if documents is None else 2 * count
        self.programs = self.B  # before `place`, for fake tensors

    def place(self, packed: Documents | None) -> None:
        """Cut the sequences into segments; packed documents only if one of them is long."""
        segment = self.segment
        if packed and not packed.reaches(cdiv(FEWEST_OF_LONGEST * segment * CHUNK, self.steps)):
            segment = -(-self.rows // CHUNK)  # cutting the longest would not finish it much sooner
        self.layout = layout(packed, self.B, self.rows, CHUNK, CHUNK, segment * CHUNK, self.device, self.steps)
        self.cut, self.ends = self.layout.cut, self.layout.ends
        self.programs = self.B if packed is None and self.most == 0 else len(self.layout.segments)
        if packed:
            self.many = packed.room
            self.programs = self.many + (self.rows // (segment * CHUNK) if self.cut else 0)
        if self.halved:
            half = -(-self.rows // (2 * CHUNK)) * CHUNK
            self.halves = layout(None, self.B, self.rows, CHUNK, CHUNK, half, self.device).segments
            self.second_halves = self.halves[1::2].contiguous()

    @cached_property
    def kept(self) -> Shapes:
        """Shapes and dtypes of what `prepare` stores of all chunks, and of what the pass along time saves."""
        B, rows, V, M, K, slots = self.B, self.rows, self.V, self.M, self.K, self.slots
        pairs, bounds = ((slots, M, CHUNK, CHUNK), self.dtype), ((slots, M), torch.float32)
        of_chunks: Shapes = [pairs, pairs, ((slots, M, 4, CHUNK), torch.float32)]
        of_chunks.append(bounds if self.most or self.halved else None)
        along: Shapes = [((B, rows, M, V), self.dtype), ((slots, M, K, V), self.dtype)]
        of_segments: Shapes = [((self.most, M, K, K), torch.float32), ((self.most, M), torch.float32)]
        return [*of_chunks, *along, *(of_segments if self.most else (None, None))]

    def shapes(self, count: int) -> Shapes:
        """Shapes and dtypes of the op's outputs: o, the final states, and the first `count` of what gradients need."""
        results: Shapes = [
            ((self.B, self.T, self.H, self.V), self.dtype),
            ((self.N, self.M, self.K, self.V), torch.float32),
        ]
        return [*results, *self.kept[:count], *[None] * (len(self.kept) - count)]

    @cached_property
    def case(self) -> Case:
        """The quantities that the choice of kernels depends on."""
        whole_rows = self.documents is None and self.most == 0
        halvable = whole_rows and -(-self.rows // CHUNK) >= 2 * FEWEST_CHUNKS
        return Case(
            self.K, self.V, self.dtype, self.device, self.programs * self.M, halvable, filled=self.deterministic
        )

    @cached_property
    def prepare_path(self) -> str:
        """Name of the path that prepares the chunks."""
        return select(PREPARE, self.case).name

    @cached_property
    def in_gluon(self) -> bool:
        """Return whether a kernel in Gluon runs the forward pass."""
        return takes(FORWARD, self.case._replace(narrow=self.narrow("forward")))

    def scores_in_pass(self, kept: bool) -> bool:
        """Return whether the forward pass computes the scores itself: in deterministic mode, training and inference
        run the same kernels.
        """
        stored = kept or self.deterministic
        return self.in_gluon and takes(SCORES, self.case._replace(stored=stored))

    @cached_property
    def backward_path(self) -> str:
        """Name of the path that computes the gradients."""
        return first_match(BACKWARD, self.case).name

    @property
    def halved(self) -> bool:
        """Return whether the backward pass runs over two halves of each sequence."""
        return self.documents is None and self.most == 0 and self.backward_path == "one_pass_in_halves"

    def _room(self, recurrences: int) -> int:
        """The number of segments per sequence whose programs fill the device."""
        room = fitting(self.entry("forward"), recurrences, self.V, self.device)
        one_pass = Case(self.K, self.V, self.dtype, self.device).gluon_backward
        return max(room, multiprocessors(self.device) // recurrences) if one_pass else room

    def states(self) -> Tensor:
        """One uninitialised state per segment."""
        return self.new(self.layout.segments.shape[0], self.M, self.K, self.V, dtype=torch.float32)

    def entry(self, kernel: str) -> LaunchConfig:
        """The launch configuration of a kernel."""
        return launch(f"delta_rule.{kernel}", self.size, self.dtype, self.device)

    def narrow(self, kernel: str) -> bool:
        """Return whether a sequential pass runs in narrow blocks of values."""
        if self.long or self.cut or self.deterministic:
            return False
        entry = optional("delta_rule.narrow", self.size, self.dtype, self.device)
        return entry is not None and fitting(self.entry(kernel), self.many * self.M, self.V, self.device) > 1

    def pass_entry(self, kernel: str) -> LaunchConfig:
        """The launch configuration of a sequential pass."""
        path = select(SEQUENTIAL, self.case._replace(narrow=self.narrow(kernel))).name
        return self.entry({"long_keys": "long", "narrow_blocks": "narrow", "wide_blocks": kernel}[path])

    def blocks(self, kernel: str) -> tuple[int, int, int]:
        """Sizes of the blocks of keys and of values, and the number of blocks of keys."""
        entry = self.entry(kernel)
        keys = min(entry.keys, key_block(self.K))
        return keys, min(entry.values, block(self.V)), cdiv(self.K, keys)

    def registers(self, entry: LaunchConfig) -> int | None:
        """Most registers per thread. Three programs then fit, with a few spills; the compiler would use 195 to 242."""
        return THIRD if self.dtype == torch.bfloat16 and entry.warps == 4 else None

    def _prepared(self, kernel: Any, entry: LaunchConfig, programs: int, **constants: Any) -> LaunchSpec:
        exact = self.dtype == torch.float32
        # Triton's interpreter gets bf16 arithmetic wrong: loads convert to fp32 immediately
        dtype = tl.float32 if exact or INTERPRETED else tl.bfloat16
        precision = "tf32x3" if exact and not INTERPRETED else "ieee"
        sizes: dict[str, Any] = {
            "M": self.M,
            "E": self.E,
            "R": self.R,
            "STEPS": self.steps,
            "K": self.K,
            "DTYPE": dtype,
            "PRECISION": precision,
        }
        warps, stages = entry.warps, entry.stages
        return LaunchSpec(kernel, programs, self.scale, **sizes, **constants, warps=warps, stages=stages, checked=True)

    @prepared
    def prepare(self, gate: str) -> LaunchSpec:
        """Inverse, scores and gates: one program per chunk and recurrence."""
        programs = self.layout.chunks.shape[0] * self.M
        if self.prepare_path == "hopper_prepare":
            from .hopper_prepare import prepare as in_gluon  # the interpreter and other devices do without Gluon

            sizes: dict[str, Any] = {"M": self.M, "E": self.E, "R": self.R, "STEPS": self.steps, "GATE": gate}
            return LaunchSpec(in_gluon, programs, self.scale, **sizes, warps=4, registers=FOURTH, checked=True)
        entry = self.entry("prepare")
        merge = "ieee" if INTERPRETED else "tf32x3" if self.dtype == torch.float32 else "tf32"
        constants = {"BK": min(entry.keys, key_block(self.K)), "GATE": gate, "MERGE": merge}
        return self._prepared(prepare, entry, programs, **constants, registers=self.registers(entry))

    def _along_time(self, kernel: Any, entry: LaunchConfig, segments: int, V: int) -> LaunchSpec:
        """One program per segment, recurrence and block of values."""
        BV = min(entry.values, block(V))
        BK = entry.keys if self.long else key_block(self.K)
        sizes = {"V": V, "BK": BK, "STAGES": entry.stages, "BV": BV}
        return self._prepared(kernel, entry, segments * self.M * cdiv(V, BV), **sizes)

    @prepared
    def forward(self, segments: int, columns: int) -> LaunchSpec:
        """The pass along time over the first `segments` segments, with states [K,columns]."""
        kernel = long_forward if self.long else scan_forward
        return self._along_time(kernel, self.pass_entry("forward"), segments, columns)

    @prepared
    def outputs(self, saved: bool) -> LaunchSpec:
        """The pass along time over all segments in Gluon, which may save what the gradients need.

        A program with two chains reads each tile once for twice as many values. Where U and states are saved, storing
        them takes longer than the chains do, so such programs have one chain.
        """
        # the interpreter and other devices do without Gluon
        from .hopper_sequential_pass import scan_forward as in_gluon

        blocks, places = len(self.layout.segments) * self.M * self.V // 64, multiprocessors(self.device)
        fewer_waves = cdiv(blocks, places) > cdiv(blocks // 2, places)
        chains = 2 if fewer_waves and not saved and self.V % 128 == 0 else 1
        sizes: dict[str, Any] = {"M": self.M, "E": self.E, "R": self.R, "STEPS": self.steps, "V": self.V}
        return LaunchSpec(in_gluon, blocks // chains, self.scale, **sizes, CHAINS=chains, warps=4, checked=True)

    @prepared
    def backward(self, segments: int) -> LaunchSpec:
        """The reverse pass along time, for the gradients."""
        kernel = long_backward if self.long else scan_backward
        return self._along_time(kernel, self.pass_entry("backward"), segments, self.V)

    @prepared
    def combine(self, reverse: bool) -> LaunchSpec:
        """From the map of each segment to the states before all segments, or in reverse the gradients after them."""
        BV, precision = 16, "ieee" if INTERPRETED else "tf32x3"
        constants: dict[str, Any] = {
            "K": self.K,
            "V": self.V,
            "BK": 64,
            "BV": BV,
            "REVERSE": reverse,
            "STAGES": 2 if self.K <= 128 else 1,  # of longer keys, two do not fit
            "PRECISION": precision,
        }
        return LaunchSpec(combine, self.N * self.M * cdiv(self.V, BV), self.M, **constants, warps=4, checked=True)

    @prepared
    def one_pass(self) -> LaunchSpec:
        """All gradients but that of the log decay: one program per segment and recurrence."""
        from .hopper_backward import gradients  # the interpreter and other devices do without Gluon

        programs = len(self.halves if self.halved else self.layout.segments) * self.M
        sizes: dict[str, Any] = {"M": self.M, "E": self.E, "R": self.R, "STEPS": self.steps}
        return LaunchSpec(gradients, programs, self.scale, **sizes, warps=8, checked=True)

    def _over_chunks(self, kernel: Any, name: str, **constants: Any) -> LaunchSpec:
        """One program per chunk, recurrence and block of keys."""
        entry, (keys, values, parts) = self.entry(name), self.blocks(name)
        sizes = {"V": self.V, "BK": keys, "BV": values, "STAGES": entry.stages}
        return self._prepared(kernel, entry, self.layout.chunks.shape[0] * self.M * parts, **sizes, **constants)

    @prepared
    def gradient_of_queries(self) -> LaunchSpec:
        """The gradients of q and β."""
        return self._over_chunks(gradient_of_queries, "dq")

    @prepared
    def gradient_of_keys(self) -> LaunchSpec:
        """The gradient of k."""
        return self._over_chunks(gradient_of_keys, "dk", registers=self.registers(self.entry("dk")))

    @prepared
    def gradient_of_log_decay(self, gate: str) -> LaunchSpec:
        """The gradient of the log decay: one program per chunk and recurrence."""
        parts: dict[str, Any] = {"QUERY_PARTS": self.blocks("dq")[2], "KEY_PARTS": self.blocks("dk")[2], "WAYS": 1}
        if self.backward_path != "three_passes":
            parts = {"QUERY_PARTS": 4, "KEY_PARTS": 2, "WAYS": CHUNK}
        sizes: dict[str, Any] = {"STEPS": self.steps, "GATE": gate, **parts}
        programs = self.layout.chunks.shape[0] * self.M
        return LaunchSpec(gradient_of_log_decay, programs, self.M, **sizes, warps=1, checked=True)


def segments(room: int, chunks: int) -> int:
    """Number of segments that the passes along time cut each sequence into, if `room` segments fill the device.

    Segments cost two more passes, so that a few of them, or short ones, gain nothing.
    """
    count = min(room, chunks // FEWEST_CHUNKS)
    # every segment has a chunk
    return -(-chunks // -(-chunks // count)) if count >= FEWEST_SEGMENTS else 1


def fitting(wide: LaunchConfig, recurrences: int, V: int, device: torch.device) -> int:
    """Return how many times the programs of a pass fit on the device."""
    return multiprocessors(device) // (max(1, recurrences) * -(-V // wide.values))


def block(size: int) -> int:
    """The block that holds a whole axis: matrix products need a power of two, at least 16."""
    return max(16, next_power_of_2(size))


def key_block(size: int) -> int:
    """The block size of keys: at least 64.

    With 64 values, blocks of 16 and 32 give wrong gradients on Hopper with Triton 3.6.
    """
    return max(64, block(size))
