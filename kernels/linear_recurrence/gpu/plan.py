"""Sizes and layout of a call of the linear recurrence on a GPU."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...core.allocation import CONSTANT_STRIDES, OTHER_STRIDES
from ...core.deterministic import is_deterministic
from ...core.documents import Documents
from ...gpu.device import multiprocessors
from ...gpu.launch import cdiv, next_power_of_2
from ...gpu.launch_table import LaunchConfig, launch
from ...gpu.layout import CHUNK, layout, most_chunks
from ...gpu.paths import select
from ...gpu.plan import Plan
from .select import PATHS, Case
from .sequential_pass import COLUMNS, REST_OF_SUMS, TOTAL

BLOCK = 512  # tokens between two anchors of the gradients of the gates; segments are whole blocks
LARGEST = 1 << 31  # elements of a segment, which are indexed with 32 bits
FILLING = 1 << 16  # blocks that fill any device
RESIDENT = 2  # programs of the sequential pass that run concurrently on one multiprocessor
Shape = tuple[int, ...]
GATES = {1: "constant", 3: "head", 4: "channel"}  # by the number of axes of the log decay
LARGE_STATES = 1 << 28  # bytes of states before all chunks above which the backward pass divides the batch


class Stream(NamedTuple):
    """A tensor [B,T,heads,size] as the kernels see it: the tokens of all rows in sequence, and two strides."""

    token: int
    head: int
    size: int


class Sizes(NamedTuple):
    """Arguments of a plan."""

    q_shape: torch.Size  # [B,T,G·E,K]
    q_stride: tuple[int, ...]
    k_stride: tuple[int, ...]
    v_shape: torch.Size  # [B,T,H,V]
    v_stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    gate: str  # none, constant, head or channel
    beta: bool
    scale: float
    subheads: int
    backward: bool = False
    gate_gradients: bool = False  # in the backward pass, whether log_decay or beta needs a gradient
    decay_dtype: torch.dtype = torch.float32


class LinearRecurrence(Plan):
    """The plan of a call, forward or backward."""

    def __init__(self, *sizes: Any):
        self.sizes = sizes_ = Sizes(*sizes)
        super().__init__(sizes_.dtype, sizes_.device)
        self.B, self.T, key_heads, self.K = sizes_.q_shape
        self.H, self.V = sizes_.v_shape[2:]
        self.scale, self.subheads, self.backward = sizes_.scale, sizes_.subheads, sizes_.backward
        self.gate, self.decay_dtype, self.gate_gradients = sizes_.gate, sizes_.decay_dtype, sizes_.gate_gradients
        self.heads = self.H * self.subheads
        self.groups = self.heads // key_heads  # value heads per key head
        self.channel = self.gate == "channel"
        self.wide = self.dtype == torch.float32  # decays are summed in fp64
        scalar = not self.channel and not self.gate_gradients
        slices = self.slices(max(self.K, self.V), self.entry("carry"))[1] if scalar else 0
        # a deterministic plan takes the way of a batch that fills the device
        blocks = FILLING if self.deterministic else self.heads * self.B * -(-self.T // BLOCK)
        case = Case(self.gate, sizes_.beta, self.K, self.V, self.dtype, self.device)
        case = case._replace(backward=self.backward, gate_gradients=self.gate_gradients, slices=slices, blocks=blocks)
        self.path = select(PATHS, case).name
        self.gluon = self.path.startswith("hopper")
        self.scores_in_pass = self.path in ("scores_in_pass", "hopper_scalar_decay")
        self.constant = self.path == "scores_in_pass" and self.gate in ("none", "constant")
        self.parts = int(REST_OF_SUMS if self.scores_in_pass else COLUMNS if self.gate_gradients else TOTAL) + 1

    def place(self, packed: Documents | None) -> None:
        """Cut the sequences into segments, and choose how to read q, k and v within them."""
        shape, v_shape = self.sizes.q_shape, self.sizes.v_shape
        room = filling(self.heads, self.K, self.V, self.dtype, self.device, self.path == "hopper_vector_decay")
        segment = 1 if packed else segment_length(shape, v_shape, self.subheads, room)
        shapes = (shape, shape, v_shape)
        strides = (self.sizes.q_stride, self.sizes.k_stride, self.sizes.v_stride)
        streams = [stream(*of, min(segment, self.T)) for of in zip(shapes, strides, strict=True)]
        if self.gluon:
            fits = [x and x.token % CONSTANT_STRIDES == x.head % OTHER_STRIDES == 0 for x in streams]
            streams = [x if fit else None for x, fit in zip(streams, fits, strict=True)]
        self.copied = [x is None for x in streams]
        q, k, v = (x or dense(*shape[2:]) for x, shape in zip(streams, shapes, strict=True))
        self.streams = {"q": q, "k": k, "v": v, "grad": dense(self.H, self.V), "queries": q, "keys": k}
        if self.path == "vector_decay":  # these then contain their decays
            self.streams["queries"] = self.streams["keys"] = dense(self.heads, self.K)
        if packed:
            widest = max(self.heads * max(self.K, self.V, CHUNK), q.token, k.token, v.token)
            wanted = cdiv(cdiv(self.T, BLOCK), room)
            segment = BLOCK * max(1, min(LARGEST // widest // BLOCK, wanted))
        self.layout = layout(packed, self.B, self.T, CHUNK, BLOCK, segment, self.device)
        self.segmented = self.layout.cut > 0
        self.chunks, self.blocks = self.layout.chunks.shape[0], self.layout.blocks.shape[0]
        self.segments, self.sequences = self.layout.segments.shape[0], self.layout.sequences.shape[0]
        self.slots = most_chunks(self.B, self.T, self.sequences if packed else None)
        self.rows_at_a_time = self.B if packed or self.segmented else self.rows_of_large_states(room)

    def rows_of_large_states(self, room: int) -> int:
        """Return for how many rows of the batch the backward pass recomputes the states at a time.

        For large states, it is the smallest number that fills the device, so that no row is cut, and takes at most 5 %
        more rounds of programs than one launch for all rows.

        Args:
            room: The number of rows that fill the device.
        """
        if self.B * self.T * self.heads * self.K * self.V // CHUNK * self.dtype.itemsize <= LARGE_STATES:
            return self.B

        def rounds(rows: int) -> int:
            return cdiv(self.B, rows) * cdiv(rows * self.heads, multiprocessors(self.device))

        most = rounds(self.B) * 1.05
        return next((rows for rows in range(room, self.B) if rounds(rows) <= most), self.B)

    def entry(self, kernel: str) -> LaunchConfig:
        """The launch configuration of a kernel."""
        return launch(f"linear_recurrence.{kernel}", max(self.K, self.V), self.dtype, self.device)

    def slices(self, size: int, entry: LaunchConfig) -> tuple[int, int]:
        """Width and number of the slices that a kernel cuts an axis into."""
        width = min(entry.block, padded(size))
        return width, -(-size // width)

    def strides(self, **streams: str) -> tuple[list[int], dict[str, Any]]:
        """Arguments of a kernel: the head strides of its streams, and by name their token strides.

        Kernels are compiled for the token strides: like the number of heads, these do not depend on the length.
        """
        by_name = {name: self.streams[of] for name, of in streams.items()}
        return [x.head for x in by_name.values()], {f"{name}_token": x.token for name, x in by_name.items()}

    @property
    def of_sums(self) -> dict[str, Any]:
        """Constants of kernels that sum decays per channel: whether in fp64, and the dtype of factors of products."""
        return {"WIDE": self.wide, "DOT": tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32}

    def options(self, entry: LaunchConfig) -> dict[str, Any]:
        """The options that all kernels with matrix products share."""
        precision = "tf32x3" if self.wide else "tf32"
        return {"PRECISION": precision, "warps": entry.warps, "stages": entry.stages, "checked": True}

    def per_token(self, size: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised [B,T,H·E,size]."""
        return self.new(self.B, self.T, self.heads, size, dtype=dtype)

    def sums(self) -> Tensor:
        """Memory for the sums of decays per channel, in fp64 if the op is in fp32."""
        return self.per_token(self.K, torch.float64 if self.wide else torch.float32)

    def states(self) -> Tensor:
        """Uninitialised states [N,H·E,K,V]."""
        return self.new(self.sequences, self.heads, self.K, self.V, dtype=torch.float32)

    def states_of_chunks(self) -> Tensor:
        """Uninitialised states before all chunks."""
        return self.new(*states_of_chunks(self.slots, self.heads, self.K, self.V))

    def ends_of_chunks(self) -> Tensor:
        """Uninitialised sums of the decays over blocks of 8 tokens in all chunks."""
        return self.new(*ends_of_chunks(self.slots, self.heads, self.K), dtype=torch.float32)


def filling(heads: int, K: int, V: int, dtype: torch.dtype, device: torch.device, one_pass: bool) -> int:
    """Number of segments, over all sequences, that fill the device; 1 in deterministic mode, where none is cut."""
    if is_deterministic():
        return 1
    if one_pass:  # each program needs a whole multiprocessor
        return max(1, multiprocessors(device) // heads)
    slices = -(-V // launch("linear_recurrence.carry", max(K, V), dtype, device).block)
    return max(1, RESIDENT * multiprocessors(device) // (slices * heads))


def segment_length(q_shape: Sequence[int], v_shape: Sequence[int], subheads: int, room: int) -> int:
    """Tokens of the segments that the rows of a batch are cut into, if `room` of them fill the device."""
    (B, T, _, K), V = q_shape, v_shape[3]
    heads = v_shape[2] * subheads
    longest = LARGEST // (heads * max(K, V, CHUNK))
    wanted = -(-B * -(-T // BLOCK) // room)
    return BLOCK * max(1, min(longest // BLOCK, wanted))


def states_of_chunks(slots: int, heads: int, K: int, V: int) -> Shape:
    """Shape of the states before all chunks."""
    return slots, heads, K, V


def ends_of_chunks(slots: int, heads: int, K: int) -> Shape:
    """Shape of the sums of decays over blocks of 8 tokens in all chunks; those of a recurrence lie together."""
    return heads, slots, 8, K


def gate_of(log_decay: Tensor | None) -> str:
    """The form of the decays."""
    return "none" if log_decay is None else GATES[log_decay.dim()]


def stream(shape: Sequence[int], stride: Sequence[int], segment: int) -> Stream | None:
    """The strides of a tensor [B,T,heads,D] whose rows follow each other in memory; None if it has to be copied.

    Args:
        shape: Shape of the tensor.
        stride: Strides of the tensor.
        segment: Tokens that 32-bit offsets have to reach over.
    """
    B, T, _, size = shape
    row, token, head, channel = stride
    joined = B == 1 or T == 1 or row == T * token
    if not joined or channel != 1 or (T > 1 and token * segment > LARGEST):
        return None
    return Stream(token if T > 1 else row, head, size)


def dense(heads: int, size: int) -> Stream:
    """The strides of a contiguous tensor."""
    return Stream(heads * size, size, size)


def padded(size: int) -> int:
    """The tile size that holds `size`: a power of two, at least 16 for matrix products."""
    return max(16, next_power_of_2(size))
