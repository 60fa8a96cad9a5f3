"""The linear recurrence in Triton: the sizes, the layout and the launches of a call."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ...core.documents import Documents
from ...gpu.launch import DIRECT, Prepared, next_power_of_2
from ...gpu.launch_table import HOPPER, Launch, capability, launch, multiprocessors
from ...gpu.layout import CHUNK, layout, most_chunks
from ...gpu.plan import Plan, prepared
from .scalar_decay import head_gate_grads, head_gates, head_scores
from .sequential_pass import COLUMNS, REST_OF_SUMS, TOTAL, carry, scan
from .vector_decay import channel_grads, channel_score_grads, channel_scores
from .vector_decay_exact import GROUP, steep_backward, steep_forward

BLOCK = 512  # tokens between two anchors of the gradients of the gates; segments are whole blocks
SCAN_BLOCK = 1024
LARGEST = 1 << 31  # elements of a segment, which are indexed with 32 bits
RESIDENT = 2  # programs of the sequential pass that run concurrently on one multiprocessor
Shape = tuple[int, ...]
Kept = tuple[Shape, torch.dtype]
GATES = {1: "constant", 3: "head", 4: "channel"}  # by the number of axes of the log decay
AT_ONCE = 128  # channels of keys and of values for which a decay per channel takes one pass on Hopper
ALIGNED = 8  # elements that are copied at a time there
FEW = 2  # slices: up to this many, each computes the scores of a chunk for itself, where nothing else needs them
# x, y and z of the sequential passes (`triton_carry.py`), and `other`, for the gradients of the gates
PASSES = {
    "o": ("queries", "keys", "v", "v"),
    "dq": ("grad", "v", "keys", "queries"),
    "dk": ("v", "grad", "queries", "keys"),
    "dv": ("keys", "queries", "grad", "grad"),
}


class Stream(NamedTuple):
    """A tensor [B,T,heads,size] as the kernels see it: the tokens of all rows in sequence, and two strides."""

    token: int
    head: int
    size: int


class LinearRecurrence(Plan):
    """The plan of a call, forward or backward.

    Args:
        q_shape: Shape of q [B,T,G·E,K].
        q_stride: Strides of q, as from `Tensor.stride()`.
        k_stride: Strides of k.
        v_shape: Shape of v [B,T,H,V].
        v_stride: Strides of v.
        dtype: Dtype of q, k and v.
        device: Device of q, k and v.
        gate: Form of the decays: none, constant, head or channel.
        beta: Whether there are input gates.
        scale: Factor on the output.
        subheads: Subheads E per head.
        backward: Whether this is the backward pass.
        gates: In the backward pass, whether log_decay or beta needs a gradient.
        decay_dtype: Dtype of log_decay if it is per channel.
    """

    def __init__(
        self,
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
        decay_dtype: torch.dtype = torch.float32,
    ):
        super().__init__(dtype, device)
        self.B, self.T, _, self.K = q_shape
        self.H, self.V = v_shape[2:]
        self.scale, self.subheads, self.backward, self.gates = scale, subheads, backward, gates
        self.heads = self.H * subheads
        self.groups = self.heads // q_shape[2]  # value heads per key head
        self.gate, self.beta, self.decay_dtype = gate, beta, decay_dtype
        self.channel, self.decays = gate == "channel", gate != "none"
        self.wide = dtype == torch.float32  # decays are summed in fp64
        self.inside = not self.channel and not gates and self.slices(max(self.K, self.V), self.entry("carry"))[1] <= FEW
        fits = all_gradients_at_once(gate, beta, self.K, self.V, dtype, device)
        self.head_pass = backward and fits and self._fills_half()
        self.inside = self.inside or self.head_pass
        self.constant = self.inside and gate in ("none", "constant") and not self.head_pass
        self.one_pass = at_once(gate, beta, self.K, self.V, dtype, device)
        self.parts = int(REST_OF_SUMS if self.inside else COLUMNS if gates else TOTAL) + 1
        self.given = ((q_shape, q_stride), (q_shape, k_stride), (v_shape, v_stride))

    def place(self, packed: Documents | None) -> None:
        """Cut the sequences into segments, and choose how to read q, k and v within them."""
        (shape, _), _, (v_shape, _) = self.given
        room = filling(self.heads, self.K, self.V, self.dtype, self.device, self.one_pass)
        segment = 1 if packed else segment_length(shape, v_shape, self.subheads, room)
        streams = [stream(*of, min(segment, self.T)) for of in self.given]
        if self.aligned:
            streams = [x if x and x.token % ALIGNED == x.head % ALIGNED == 0 else None for x in streams]
        self.copied = [x is None for x in streams]
        q, k, v = (x or dense(*shape[2:]) for x, (shape, _) in zip(streams, self.given, strict=True))
        self.streams = {"q": q, "k": k, "v": v, "grad": dense(self.H, self.V), "queries": q, "keys": k}
        if self.channel and not self.one_pass:  # these then contain their decays
            self.streams["queries"] = self.streams["keys"] = dense(self.heads, self.K)
        if packed:
            widest = max(self.heads * max(self.K, self.V, CHUNK), q.token, k.token, v.token)
            blocks = sum(-(-(stop - start) // BLOCK) for start, stop in packed.spans)
            wanted = -(-blocks // room)
            segment = BLOCK * max(1, min(LARGEST // widest // BLOCK, wanted))
        self.layout = layout(packed, self.B, self.T, CHUNK, BLOCK, segment, self.device)
        self.segmented = self.layout.cut > 0
        self.chunks, self.blocks = self.layout.chunks.shape[0], self.layout.blocks.shape[0]
        self.segments, self.sequences = self.layout.segments.shape[0], self.layout.sequences.shape[0]
        self.slots = most_chunks(self.B, self.T, len(packed.spans) if packed else None)

    @property
    def aligned(self) -> bool:
        """Return whether there are passes in Gluon, which copy 16 bytes at a time."""
        return self.one_pass or self.head_pass

    def _fills_half(self) -> bool:
        """Return whether the largest number of programs, one per multiprocessor, fills half of the GPU."""
        programs = self.heads * self.B * -(-self.T // BLOCK)
        return programs >= multiprocessors(self.device) // 2

    def entry(self, kernel: str) -> Launch:
        """The launch configuration of a kernel."""
        return launch(f"linear_recurrence.{kernel}", max(self.K, self.V), self.dtype, self.device)

    def slices(self, size: int, entry: Launch) -> tuple[int, int]:
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
    def sums(self) -> Mapping[str, Any]:
        """Options of decay sums: whether they are in fp64, and the dtype of factors around a reference."""
        return {"WIDE": self.wide, "DOT": tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32}

    def options(self, entry: Launch) -> Mapping[str, Any]:
        """The options that all kernels with matrix products share."""
        precision = "tf32x3" if self.wide else "tf32"
        return {"PRECISION": precision, "num_warps": entry.warps, "num_stages": entry.stages, "checked": True}

    @prepared
    def head_gates(self) -> Prepared:
        """The gates, where passes compute the scores."""
        numbers = self.scale, self.heads, self.chunks
        options: dict[str, Any] = {"PARTS": self.parts, "GATE": self.gate, "WIDE": self.wide}
        return Prepared(head_gates, self.chunks * self.heads, *numbers, **options, num_warps=1, checked=True)

    @prepared
    def head_scores(self) -> Prepared:
        """The gates and the scores, and in the backward pass the gradients of the scores."""
        heads, tokens = self.strides(q="q", k="k", v="v", grad="grad" if self.backward else "v")
        return Prepared(
            head_scores,
            self.chunks * self.heads,
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
        """The scores, and queries and keys with their decays applied."""
        (heads, tokens), entry = self.strides(q="q", k="k"), self.entry("channel_scores")
        return Prepared(
            channel_scores,
            self.chunks * self.heads,
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

    def _steep(self, kernel: Any, streams: Mapping[str, str]) -> Prepared:
        """A kernel for steep channels: one program per recurrence and group of chunks."""
        heads, tokens = self.strides(**streams)
        return Prepared(
            kernel,
            -(-self.chunks // GROUP.value) * self.heads,
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
            DOT=self.sums["DOT"],
            **self.options(Launch(8, 1)),
        )

    def _in_gluon(self, kernel: Any, streams: Mapping[str, str], **constants: Any) -> Prepared:
        heads, tokens = self.strides(**streams)
        numbers = (self.scale, *heads, self.chunks, self.groups)
        sizes: dict[str, Any] = {**tokens, "heads": self.heads, "SUBHEADS": self.subheads, **constants}
        return Prepared(kernel, self.segments * self.heads, *numbers, **sizes, num_warps=8, checked=True)

    @prepared
    def channel_forward(self) -> Prepared:
        """Outputs and last states."""
        from .hopper_vector_decay import outputs  # other devices do without Gluon

        return self._in_gluon(outputs, {"q": "q", "k": "k", "v": "v"})

    @prepared
    def channel_states(self, reverse: bool) -> Prepared:
        """The states alone, or in reverse their gradients."""
        from .hopper_vector_decay import states

        streams = {"x": "q", "y": "grad"} if reverse else {"x": "k", "y": "v"}
        return self._in_gluon(states, streams, REVERSE=reverse)

    @prepared
    def channel_backward(self) -> Prepared:
        """All gradients."""
        from .hopper_vector_decay import gradients

        return self._in_gluon(gradients, {"q": "q", "k": "k", "v": "v", "grad": "grad"})

    @prepared
    def head_states(self) -> Prepared:
        """The states before all chunks, if decays are per head, constant or none."""
        from .hopper_scalar_decay import states

        return self._in_gluon(states, {"k": "k", "v": "v"})

    @prepared
    def head_backward(self) -> Prepared:
        """All gradients then."""
        from .hopper_scalar_decay import gradients

        return self._in_gluon(gradients, {"q": "q", "k": "k", "v": "v", "grad": "grad"})

    @prepared
    def steep_forward(self) -> Prepared:
        """Launch that adds the part of steep channels to the outputs."""
        return self._steep(steep_forward, {"q": "q", "k": "k", "v": "v"})

    @prepared
    def steep_backward(self) -> Prepared:
        """Launch that adds the part of steep channels to the gradients."""
        return self._steep(steep_backward, {"q": "q", "k": "k", "v": "v", "grad": "grad"})

    @prepared
    def carry(self, mode: str, output: bool, gates: bool, plain: bool) -> Prepared:
        """A sequential pass.

        Args:
            mode: A key of `PASSES`.
            output: Whether there is an output, or only the state is needed.
            gates: Whether it stores what the gradients of the gates need.
            plain: Whether it also stores what the gradient of β needs.
        """
        x, y, z, other = PASSES[mode]
        heads, tokens = self.strides(x=x, y=y, z=z, other=other if gates and not self.channel else z)
        DX, DZ = self.streams[x].size, self.streams[z].size
        entry = self.entry("carry" if output else "local")
        width, slices = self.slices(DZ, entry)
        return Prepared(
            carry,
            slices * self.segments * self.heads,
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
        """From what each segment adds to the state to the states that segments start from."""
        return Prepared(
            scan,
            -(-self.K * self.V // SCAN_BLOCK) * self.heads * self.sequences,
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
        """The gradients of the gates, if they are per head."""
        return Prepared(
            head_gate_grads,
            self.blocks * self.heads,
            self.heads,
            self.chunks,
            self.blocks,
            PARTS=self.parts,
            GATE=self.gate,
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
        programs = self.chunks * self.H
        return Prepared(channel_score_grads, programs, self.scale, *heads, self.chunks, **tokens, **sizes, **options)

    @prepared
    def channel_grads(self, slow: bool) -> Prepared:
        """The gradients of q, k and the gates, if the decay is per channel."""
        (heads, tokens), entry = self.strides(q="q", k="k"), self.entry("channel_grads")
        width, slices = self.slices(self.K, entry)
        return Prepared(
            channel_grads,
            self.chunks * slices * self.heads,
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


def at_once(gate: str, beta: bool, K: int, V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a decay per channel takes one pass forward and one backward."""
    return gate == "channel" and _fits_gluon(beta, K, V, dtype, device)


def all_gradients_at_once(gate: str, beta: bool, K: int, V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether any other decay takes one pass backward."""
    return gate != "channel" and _fits_gluon(beta, K, V, dtype, device)


def _fits_gluon(beta: bool, K: int, V: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether there are passes in Gluon for these sizes."""
    fits = not beta and K == V == AT_ONCE and dtype == torch.bfloat16
    return fits and DIRECT and device.type == "cuda" and capability(device) == HOPPER


def filling(heads: int, K: int, V: int, dtype: torch.dtype, device: torch.device, one_pass: bool) -> int:
    """Number of segments, over all sequences, that fill the device."""
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


def kept(
    q: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    subheads: int,
    keep: bool,
    documents: int | None,
) -> tuple[Kept, Kept, Kept]:
    """Shapes and dtypes of what is kept for the gradients; (0,) of what is not.

    That is the states [segments,H·E,K,V] that segments start from, or the states before all chunks with the sums of
    decays in them.
    """
    (B, T, _, K), V, heads = q.shape, v.shape[3], v.shape[2] * subheads
    one_pass = at_once(gate_of(log_decay), beta is not None, K, V, v.dtype, v.device)
    nothing: Kept = (0,), torch.float32
    if keep and one_pass:
        slots = most_chunks(B, T, documents)
        ends = sums_of_chunks(slots, heads, K), torch.float32
        return nothing, (states_of_chunks(slots, heads, K, V), v.dtype), ends
    if documents is None:
        room = filling(heads, K, V, v.dtype, v.device, one_pass)
        segments = B * -(-T // segment_length(q.shape, v.shape, subheads, room))
        if segments > B:
            return ((segments, heads, K, V), torch.float32), nothing, nothing
    return nothing, nothing, nothing


def states_of_chunks(slots: int, heads: int, K: int, V: int) -> Shape:
    """Shape of the states before all chunks."""
    return slots, heads, K, V


def sums_of_chunks(slots: int, heads: int, K: int) -> Shape:
    """Shape of the sums of decays in both halves of all chunks; those of a recurrence lie together."""
    return heads, slots, 2, K


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
