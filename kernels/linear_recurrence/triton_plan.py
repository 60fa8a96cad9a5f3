"""The linear recurrence in Triton: what follows from the sizes of a call, and all of its launches."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..documents import Documents
from ..triton.enqueue import Prepared, next_power_of_2
from ..triton.launches import Launch, launch, multiprocessors
from ..triton.layout import CHUNK, layout
from ..triton.plan import Plan, prepared
from .triton_carry import COLUMNS, REST_OF_SUMS, TOTAL, carry, scan
from .triton_channel import channel_grads, channel_score_grads, channel_scores
from .triton_head import head_gate_grads, head_gates, head_scores

BLOCK = 512  # tokens between two anchors of the gradients of the gates; segments are whole blocks
SCAN_BLOCK = 1024
LARGEST = 1 << 31  # 32 bits count the elements of a segment
RESIDENT = 2  # programs of the sequential pass that run at once on one multiprocessor
FEW = 2  # slices: each makes the scores of a chunk for itself, where nothing else needs them
# x, y and z of the sequential passes (`triton_carry.py`), and what the gradients of the gates need beside z
PASSES = {
    "o": ("queries", "keys", "v", "v"),
    "dq": ("grad", "v", "keys", "queries"),
    "dk": ("v", "grad", "queries", "keys"),
    "dv": ("keys", "queries", "grad", "grad"),
}


class Stream(NamedTuple):
    """A tensor [B,T,heads,size] as the kernels see it: tokens of all rows one after another, and two strides."""

    token: int
    head: int
    size: int


class LinearRecurrence(Plan):
    """The plan of a call, forward or backward.

    Args:
        packed: The documents that are packed into one row, if any are.
        q_shape: [B,T,G·E,K].
        q_stride: As of `Tensor.stride()`.
        k_stride: The same.
        v_shape: [B,T,H,V].
        v_stride: The same.
        dtype: Of q, k and v.
        device: Where they lie.
        gate: none, constant, head or channel: the decays.
        beta: Whether there is one.
        scale: Factor of the output.
        subheads: E.
        backward: Whether this is the backward pass.
        gates: In the backward pass, whether log_decay or beta needs a gradient.
    """

    def __init__(
        self,
        packed: Documents | None,
        q_shape: torch.Size,
        q_stride: tuple[int, ...],
        k_stride: tuple[int, ...],
        v_shape: torch.Size,
        v_stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        gate: str,
        beta: bool,
        scale: float,
        subheads: int,
        backward: bool,
        gates: bool,
    ):
        super().__init__(packed, dtype, device)
        self.B, self.T, _, self.K = q_shape
        self.H, self.V = v_shape[2:]
        self.scale, self.subheads, self.backward, self.gates = scale, subheads, backward, gates
        self.heads = self.H * subheads
        self.groups = self.heads // q_shape[2]  # value heads per key head
        self.gate, self.beta = gate, beta
        self.channel, self.decays = gate == "channel", gate != "none"
        self.wide = dtype == torch.float32  # decays are summed in fp64
        segment = 1 if packed else segment_length(q_shape, v_shape, subheads, dtype, device)
        shapes = ((q_shape, q_stride), (q_shape, k_stride), (v_shape, v_stride))
        found = [stream(shape, strides, min(segment, self.T)) for shape, strides in shapes]
        self.copied = [x is None for x in found]
        q, k, v = (x or dense(*shape[2:]) for x, (shape, _) in zip(found, shapes, strict=True))
        self.streams = {"q": q, "k": k, "v": v, "grad": dense(self.H, self.V), "queries": q, "keys": k}
        if packed:
            widest = max(self.heads * max(self.K, self.V, CHUNK), q.token, k.token, v.token)
            blocks = sum(-(-(stop - start) // BLOCK) for start, stop in packed.spans)
            wanted = -(-blocks // filling(self.heads, self.K, self.V, dtype, device))
            segment = BLOCK * max(1, min(LARGEST // widest // BLOCK, wanted))
        self.layout = layout(packed, self.B, self.T, CHUNK, BLOCK, segment, device)
        self.segmented = self.layout.cut > 0
        self.chunks, self.blocks = self.layout.chunks.shape[0], self.layout.blocks.shape[0]
        self.segments, self.sequences = self.layout.segments.shape[0], self.layout.sequences.shape[0]
        if self.channel:  # then these are tensors of their own
            self.streams["queries"] = self.streams["keys"] = dense(self.heads, self.K)
        self.inside = not self.channel and not gates and self.slices(max(self.K, self.V), self.entry("carry"))[1] <= FEW
        self.constant = self.inside and gate in ("none", "constant")
        self.parts = int(REST_OF_SUMS if self.inside else COLUMNS if gates else TOTAL) + 1

    def entry(self, kernel: str) -> Launch:
        """How a kernel is launched."""
        return launch(f"linear_recurrence.{kernel}", max(self.K, self.V), self.dtype, self.device)

    def slices(self, size: int, entry: Launch) -> tuple[int, int]:
        """Width and number of the slices that a kernel cuts an axis into."""
        width = min(entry.block, padded(size))
        return width, -(-size // width)

    def strides(self, **streams: str) -> tuple[list[int], dict[str, Any]]:
        """Arguments of a kernel: how far the heads of each stream lie apart; and by name, how far its tokens do.

        Kernels are compiled for the latter: as the heads, it is the same at each length.
        """
        known = {name: self.streams[of] for name, of in streams.items()}
        return [x.head for x in known.values()], {f"{name}_token": x.token for name, x in known.items()}

    @property
    def sums(self) -> Mapping[str, Any]:
        """How decays are summed, and the dtype of factors that know a reference point: with the range of fp32."""
        return {"WIDE": self.wide, "DOT": tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32}

    def options(self, entry: Launch) -> Mapping[str, Any]:
        """What all kernels with products are prepared with."""
        precision = "tf32x3" if self.wide else "tf32"
        return {"PRECISION": precision, "num_warps": entry.warps, "num_stages": entry.stages, "checked": True}

    @prepared
    def head_gates(self) -> Prepared:
        """What the gates come to, where passes make the scores."""
        numbers, grid = (self.scale, self.heads, self.chunks), (self.chunks, self.heads)
        return Prepared(head_gates, grid, *numbers, PARTS=self.parts, WIDE=self.wide, num_warps=1, checked=True)

    @prepared
    def head_scores(self) -> Prepared:
        """The same and the scores, and backward the gradients of the scores."""
        heads, tokens = self.strides(q="q", k="k", v="v", grad="grad" if self.backward else "v")
        return Prepared(
            head_scores,
            (self.chunks, self.heads),
            self.scale,
            *heads,
            self.chunks,
            self.groups,
            **tokens,
            heads=self.heads,
            SUBHEADS=self.subheads,
            K=self.K,
            V=self.V,
            BK=padded(self.K),
            BV=padded(self.V),
            PARTS=self.parts,
            GATE=self.gate,
            GATES=self.gates,
            WIDE=self.wide,
            **self.options(self.entry("head_scores")),
        )

    @prepared
    def channel_scores(self, slow: bool) -> Prepared:
        """The scores, and queries and keys with their decays inside."""
        (heads, tokens), entry = self.strides(q="q", k="k"), self.entry("channel_scores")
        return Prepared(
            channel_scores,
            (self.chunks, self.heads),
            self.scale,
            *heads,
            self.chunks,
            self.groups,
            **tokens,
            heads=self.heads,
            SUBHEADS=self.subheads,
            K=self.K,
            BK=min(entry.block, padded(self.K)),
            SLOW=slow,
            **self.sums,
            **self.options(entry),
        )

    @prepared
    def carry(self, mode: str, output: bool, gates: bool, plain: bool) -> Prepared:
        """A sequential pass.

        Args:
            mode: A key of `PASSES`.
            output: Whether there is an output, or the state alone is wanted.
            gates: Whether it leaves what the gradients of the gates need.
            plain: Whether that is what the gradient of β needs, too.
        """
        x, y, z, other = PASSES[mode]
        heads, tokens = self.strides(x=x, y=y, z=z, other=other if gates and not self.channel else z)
        DX, DZ = self.streams[x].size, self.streams[z].size
        entry = self.entry("carry" if output else "local")
        width, slices = self.slices(DZ, entry)
        return Prepared(
            carry,
            (slices * self.segments, self.heads),
            *heads,
            self.scale,
            self.chunks,
            self.blocks,
            BLOCK // CHUNK if gates and not self.channel else 1 << 30,
            self.groups,
            **tokens,
            heads=self.heads,
            MODE=mode,
            SUBHEADS=self.subheads,
            DX=DX,
            DZ=DZ,
            BX=padded(DX),
            BZ=width,
            PARTS=self.parts,
            CHANNEL=self.channel,
            DECAY=self.decays,
            CONSTANT=self.constant,
            PLAIN=plain,
            WIDE=self.wide,
            STAGES=entry.stages,
            **self.options(entry),
        )

    @prepared
    def scan(self, reverse: bool) -> Prepared:
        """From what segments add to the state to the states that they start from."""
        return Prepared(
            scan,
            (-(-self.K * self.V // SCAN_BLOCK), self.heads, self.sequences),
            self.heads,
            K=self.K,
            V=self.V,
            BLOCK=SCAN_BLOCK,
            CHANNEL=self.channel,
            DECAY=self.decays,
            REVERSE=reverse,
            num_warps=4,
            checked=True,
        )

    @prepared
    def head_gate_grads(self) -> Prepared:
        """The gradients of the gates, which are per head."""
        return Prepared(
            head_gate_grads,
            (self.blocks, self.heads),
            self.heads,
            self.chunks,
            self.blocks,
            PARTS=self.parts,
            SLICES=self.slices(self.K, self.entry("carry"))[1],
            BLOCK=BLOCK,
            num_warps=4,
            checked=True,
        )

    @prepared
    def channel_score_grads(self) -> Prepared:
        """The gradients of the scores."""
        heads, tokens = self.strides(v="v", grad="grad")
        sizes: dict[str, Any] = {"V": self.V, "BV": padded(self.V)}
        options = self.options(self.entry("head_scores"))
        grid = (self.chunks, self.H)
        return Prepared(channel_score_grads, grid, self.scale, *heads, self.chunks, **tokens, **sizes, **options)

    @prepared
    def channel_grads(self, slow: bool) -> Prepared:
        """The gradients of q, k and the gates, of which the decay is per channel."""
        (heads, tokens), entry = self.strides(q="q", k="k"), self.entry("channel_grads")
        width, slices = self.slices(self.K, entry)
        return Prepared(
            channel_grads,
            (self.chunks * slices, self.heads),
            self.scale,
            *heads,
            self.B * self.T,
            self.chunks,
            self.groups,
            **tokens,
            heads=self.heads,
            SUBHEADS=self.subheads,
            K=self.K,
            BK=width,
            SLOW=slow,
            **self.sums,
            **self.options(entry),
        )


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    subheads: int,
    backward: bool,
    gates: bool,
) -> LinearRecurrence:
    """The plan of a call; nothing is read or kept of the tensors but their shapes and strides."""
    streams = q.shape, q.stride(), k.stride(), v.shape, v.stride(), q.dtype, q.device
    of_gates = "none" if log_decay is None else GATES[log_decay.dim()], beta is not None
    return LinearRecurrence.of(cu_seqlens, q.shape[1], *streams, *of_gates, scale, subheads, backward, gates)


GATES = {1: "constant", 3: "head", 4: "channel"}  # by the axes of the log decays


def filling(heads: int, K: int, V: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many segments, over all sequences, fill the device."""
    slices = -(-V // launch("linear_recurrence.carry", max(K, V), dtype, device).block)
    return max(1, RESIDENT * multiprocessors(device) // (slices * heads))


def segment_length(
    q_shape: Sequence[int], v_shape: Sequence[int], subheads: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Tokens of the segments that the rows of a batch are cut into, known from the shapes alone."""
    (B, T, _, K), V = q_shape, v_shape[3]
    heads = v_shape[2] * subheads
    most = LARGEST // (heads * max(K, V, CHUNK))
    wanted = -(-B * -(-T // BLOCK) // filling(heads, K, V, dtype, device))
    return BLOCK * max(1, min(most // BLOCK, wanted))


def kept_states(q: Tensor, v: Tensor, subheads: int) -> tuple[int, int, int, int]:
    """Shape [segments,H·E,K,V] of the states that segments start from; no segments where rows are not cut."""
    (B, T, _, K), (H, V) = q.shape, v.shape[2:]
    segments = B * -(-T // segment_length(q.shape, v.shape, subheads, v.dtype, v.device))
    return segments if segments > B else 0, H * subheads, K, V


def stream(shape: Sequence[int], stride: Sequence[int], segment: int) -> Stream | None:
    """A tensor [B,T,heads,D] whose rows lie one after another; None if it has to be copied.

    Args:
        shape: Of the tensor.
        stride: Of the tensor.
        segment: How many tokens 32 bits have to reach over.
    """
    B, T, _, size = shape
    row, token, head, channel = stride
    joined = B == 1 or T == 1 or row == T * token
    if not joined or channel != 1 or (T > 1 and token * segment > LARGEST):
        return None
    return Stream(token if T > 1 else row, head, size)


def dense(heads: int, size: int) -> Stream:
    """The same of a contiguous tensor."""
    return Stream(heads * size, size, size)


def padded(size: int) -> int:
    """The power of two that a tile has for `size`: products need 16."""
    return max(16, next_power_of_2(size))
