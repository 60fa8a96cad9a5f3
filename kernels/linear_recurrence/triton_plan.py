"""What follows from the sizes of a call of the linear recurrence alone: made once for calls that are alike."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .. import launch_file
from ..documents import documents
from ..enqueue import Prepared, next_power_of_2
from ..launch import Launch, launch
from .layout import CHUNK, LARGEST, Layout, filling, of_documents, of_rows, segment_length
from .triton_carry import COLUMNS, REST_OF_SUMS, TOTAL

FEW = 2  # slices: each makes the scores of a chunk for itself, where nothing else needs them
MOST = 256  # plans that are kept
Strides = tuple[int, int]  # of a token, and of a head
plans: dict[Hashable, "Plan"] = {}


class Plan:
    """Sizes, the layout of chunks and segments, and launches of which only the tensors are missing.

    Args:
        q, k, v, log_decay, beta, cu_seqlens, scale, subheads: Of the call. Nothing is read or kept of the first five
            but their shapes and strides.
        backward: Whether this is the backward pass.
        gates: In the backward pass, whether log_decay or beta needs a gradient.
    """

    def __init__(
        self,
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
    ):
        self.B, self.T, _, self.K = q.shape
        self.H, self.V = v.shape[2:]
        self.scale, self.subheads, self.backward, self.gates = scale, subheads, backward, gates
        self.heads = self.H * subheads
        self.groups = self.heads // q.shape[2]  # value heads per key head
        self.gate = "none" if log_decay is None else {1: "constant", 3: "head", 4: "channel"}[log_decay.dim()]
        self.channel, self.decays, self.beta = self.gate == "channel", log_decay is not None, beta is not None
        self.dtype, self.device = q.dtype, q.device
        self.wide = q.dtype == torch.float32  # decays are summed in fp64
        segment = 1 if cu_seqlens is not None else segment_length(q, v, subheads)
        found = [strides(x, min(segment, self.T)) for x in (q, k, v)]
        self.copied = [x is None for x in found]
        self.q, self.k, self.v = (x or dense(*of.shape[2:]) for x, of in zip(found, (q, k, v), strict=True))
        self.layout = self._layout(segment, cu_seqlens)
        self.chunks, self.blocks = self.layout.chunks.shape[0], self.layout.blocks.shape[0]
        self.segments, self.sequences = self.layout.segments.shape[0], self.layout.sequences.shape[0]
        self.sequential, self.local = self.launch("carry"), self.launch("local")
        self.inside = not self.channel and not gates and self.slices(max(self.K, self.V))[1] <= FEW
        self.constant = self.inside and self.gate in ("none", "constant")
        self.parts = int(REST_OF_SUMS if self.inside else COLUMNS if gates else TOTAL) + 1
        self.prepared: dict[Hashable, Prepared] = {}

    def _layout(self, segment: int, cu_seqlens: Tensor | None) -> Layout:
        if cu_seqlens is None:
            return of_rows(self.B, self.T, segment, self.device)
        widest = max(self.heads * max(self.K, self.V, CHUNK), *(x[0] for x in (self.q, self.k, self.v)))
        segments = filling(self.heads, self.K, self.V, self.dtype, self.device)
        return of_documents(cu_seqlens, self.T, segments, LARGEST // widest, self.device)

    def launch(self, kernel: str) -> Launch:
        return launch(kernel, max(self.K, self.V), self.dtype, self.device)

    def slices(self, size: int, entry: Launch | None = None) -> tuple[int, int]:
        """Width and number of the slices that a pass cuts z into."""
        width = min((entry or self.sequential).block, padded(size))
        return width, -(-size // width)

    @property
    def sums(self) -> Mapping[str, Any]:
        """How decays are summed, and the dtype of factors that know a reference point: with the range of fp32."""
        return {"WIDE": self.wide, "DOT": tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32}

    def options(self, entry: Launch) -> Mapping[str, Any]:
        """What all kernels with products are prepared with."""
        precision = "tf32x3" if self.wide else "tf32"
        return {"PRECISION": precision, "num_warps": entry.warps, "num_stages": entry.stages, "checked": True}

    def ready(self, name: Hashable, prepare: Callable[[], Prepared]) -> Prepared:
        """The launch of this name, prepared the first time."""
        found = self.prepared.get(name)
        if found is None:
            found = self.prepared[name] = prepare()
        return found


def plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    *numbers: Any,
) -> Plan:
    """The plan of a call, whose tensors and numbers are those of `Plan`. Documents keep those of their packing."""
    of_gates = None if log_decay is None else log_decay.dim(), beta is None
    of_tokens = q.shape, q.stride(), k.stride(), v.shape, v.stride(), q.dtype, q.device
    alike = (*of_tokens, *of_gates, *numbers, launch_file.current())
    known = plans
    if cu_seqlens is not None:
        known = documents(cu_seqlens, q.shape[1]).__dict__.setdefault("_plans", {})
    found = known.get(alike)
    if found is None:
        if len(known) == MOST:
            known.clear()
        found = known[alike] = Plan(q, k, v, log_decay, beta, cu_seqlens, *numbers)
    return found


def strides(x: Tensor, segment: int) -> Strides | None:
    """Of a token and of a head of x [B,T,heads,D] whose rows lie one after another; None if it has to be copied.

    Args:
        x: The tensor.
        segment: How many tokens 32 bits have to reach over.
    """
    B, T = x.shape[:2]
    row, token, head, channel = x.stride()
    joined = B == 1 or T == 1 or row == T * token
    if not joined or channel != 1 or (T > 1 and token * segment > LARGEST):
        return None
    return token if T > 1 else row, head


def dense(heads: int, size: int) -> Strides:
    """The same of a contiguous tensor."""
    return heads * size, size


def padded(size: int) -> int:
    """The power of two that a tile has for `size`: products need 16."""
    return max(16, next_power_of_2(size))
