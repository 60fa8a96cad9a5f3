"""The selective scan in Triton: which kernels run, in which order, on which tensors.

Forward: the states at the cuts between chunks, which are all that is saved, then all chunks in parallel. Backward: the
gradients of these states, then all chunks in parallel. A sequence of a single chunk, such as a decoded token, takes one
launch. There are no atomics: equal inputs give equal bits.
"""

from typing import Any

import torch
from torch import Tensor

from ...core.autograd import Gradients, register
from ...core.documents import Documents
from ...gpu.launch import LaunchSpec, cdiv, next_power_of_2
from ...gpu.layout import layout
from ...gpu.plan import Plan, prepared
from ...gpu.reductions import add_outer, add_parts
from ..arguments import Scan
from .chunks import combine, walk
from .gradients import gradients

SHORT, LONG = 64, 256  # tokens per chunk
FROM = 8192  # tokens from which even long chunks are enough to fill a device, and short ones are slow to combine
PART = 16  # tokens whose states are in memory together while their gradients are computed
CHANNELS = 64  # most channels whose states one warp holds
ELEMENTS, GRADIENT_ELEMENTS = 1024, 512  # per tile of states; the gradients need several tiles together


class SelectiveScan(Plan):
    """The plan of a call over S sequences, which have at most `slots` chunks.

    Args:
        shape: Shape of x [B,T,D].
        states: States N per channel.
        read: What c is: ones, constant or each (one per token).
        documents: Number of documents packed into one row; None without packing.
        x: Dtype and device of x.
    """

    def __init__(self, shape: torch.Size, states: int, read: str, documents: int | None, *x: Any):
        super().__init__(*x)
        (self.B, self.T, self.D), self.N, self.read = shape, states, read
        self.length = SHORT if self.T < FROM or self.deterministic else LONG
        self.per_row = -(-self.T // self.length)
        # every sequence is a single chunk; not in deterministic mode, since states that are combined round differently
        self.whole = documents is None and self.per_row == 1 and not self.deterministic
        self.S = self.B if documents is None else documents
        self.slots = self.B * self.per_row if documents is None else self.T // self.length + documents

    def place(self, packed: Documents | None) -> None:
        longest = self.per_row * self.length
        self.layout = layout(packed, self.B, self.T, self.length, self.length, longest, self.device)
        self.chunks = self.layout.chunks.shape[0]

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Uninitialised y, final states, and states before all chunks (none if every sequence is one chunk)."""
        y, final = self.new(self.B, self.T, self.D), self.states(self.S)
        return y, final, self.states(0 if self.whole else self.slots)

    def states(self, count: int) -> Tensor:
        return self.new(count, self.D, self.N, dtype=torch.float32)

    def tile(self, elements: int) -> tuple[int, int]:
        states = next_power_of_2(self.N)
        return max(1, min(CHANNELS, elements // states)), states

    def _prepared(self, kernel: Any, rows: int, elements: int, *numbers: int, **constants: Any) -> LaunchSpec:
        """One program per row of states and block of channels."""
        BD, BN = self.tile(elements)
        sizes: dict[str, Any] = {"D": self.D, "N": self.N, "BD": BD, "BN": BN}
        return LaunchSpec(kernel, rows * cdiv(self.D, BD), *numbers, **sizes, **constants, warps=1)

    @prepared
    def walk(self, reverse: bool) -> LaunchSpec:
        """Through each chunk from the state before it, or in reverse from the gradient after it."""
        return self._prepared(walk, self.chunks, ELEMENTS, READ=self.read, REVERSE=reverse)

    @prepared
    def combine(self, reverse: bool) -> LaunchSpec:
        """From what each chunk adds to the states before all chunks, or in reverse the gradients after them."""
        return self._prepared(combine, self.S, ELEMENTS, self.length, REVERSE=reverse)

    @property
    def marks(self) -> int:
        return cdiv(self.length, PART)

    @prepared
    def gradients(self) -> LaunchSpec:
        """The gradients of all tensors, from the states before all chunks and the gradients after them."""
        numbers = self.B * self.T, self.marks
        return self._prepared(gradients, self.chunks, GRADIENT_ELEMENTS, *numbers, PART=PART, READ=self.read)


def sizes(a: Scan) -> tuple[Any, ...]:
    """The arguments of the plan."""
    read = "ones" if a.c is None else "constant" if a.c.dim() == 2 else "each"
    documents = None if a.cu_seqlens is None else a.cu_seqlens.shape[0] - 1
    return a.x.shape, a.rate.shape[1], read, documents, a.x.dtype, a.x.device


def _plan_of(a: Scan) -> SelectiveScan:
    return SelectiveScan.of(a.cu_seqlens, a.x.shape[1], *sizes(a))


def cuts(plan: SelectiveScan, reverse: bool, x: Tensor, arguments: list[Any], states: Tensor, *ends: Any) -> None:
    """Fill the states before all chunks and the final states, or in reverse the gradients after chunks and of h_0.

    Args:
        plan: Sizes and launches.
        reverse: Whether it is about the gradients.
        x: Inputs, or in reverse the gradients of the outputs.
        arguments: log_decay, rate, b and c.
        states: Filled with the states at the cuts.
        ends: The states at the first end, or None, and those at the other end, which are filled.
    """
    totals = plan.new(plan.chunks, plan.D, dtype=torch.float32)
    plan.walk(reverse)(x, *arguments, None, states, totals, None, plan.layout.chunks)
    plan.combine(reverse)(arguments[1], states, totals, *ends, plan.layout.segments)


def _dense(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x.contiguous() for x in tensors]


def _sum(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the parts of blocks of channels [n,B,T,N], or of chunks [n,D,N], to which zeros may be appended."""
    if parts.dim() == 4:
        return add_outer(parts, dtype)
    return add_parts(parts.flatten(1)[:, None], dtype).view(parts.shape[1:])


def _compute(args: Scan) -> tuple[Tensor, Tensor, Tensor]:
    plan = _plan_of(args)
    x, *arguments, initial = _dense(*args[:6])
    y, final, states = plan.results()
    if plan.whole:
        plan.walk(False)(x, *arguments, initial, final, None, y, plan.layout.chunks)
    else:
        cuts(plan, False, x, arguments, states, initial, final)
        plan.walk(False)(x, *arguments, states, None, None, y, plan.layout.chunks)
    return y, final, states


def _differentiate(args: Scan, needed: Any, dy: Tensor | None, dfinal: Tensor | None, states: Tensor) -> Gradients:
    plan, (_, log_decay, rate, b, c, initial_state, _) = _plan_of(args), args
    x, *arguments, initial, dy, dfinal = _dense(*args[:6], dy, dfinal)
    dy = torch.zeros_like(x) if dy is None else dy
    dinitial = plan.states(plan.S)
    first, after = (initial, dfinal) if plan.whole else (states, plan.states(plan.chunks))
    if not plan.whole:
        cuts(plan, True, dy, arguments, after, dfinal, dinitial)
    BD, BN = plan.tile(GRADIENT_ELEMENTS)
    blocks = cdiv(plan.D, BD)
    scratch = plan.new(plan.chunks * blocks, PART + plan.marks, BN, BD, dtype=torch.float32)
    dx, dlog_decay = plan.new(*x.shape), plan.new(*log_decay.shape, dtype=log_decay.dtype)
    drate = plan.states(plan.chunks) if needed.rate else None
    db = None if b is None else plan.new(blocks, *b.shape, dtype=torch.float32)
    dc = None
    if c is not None:
        dc = plan.states(plan.chunks) if c.dim() == 2 else plan.new(blocks, *c.shape, dtype=torch.float32)
    tensors = (first, after, dy, scratch, dx, dlog_decay, drate, db, dc, dinitial if plan.whole else None)
    plan.gradients()(x, *arguments, *tensors, plan.layout.chunks)
    parts = {"rate": (drate, rate), "b": (db, b), "c": (dc, c)}
    summed = {name: None if g is None or z is None else _sum(g, z.dtype) for name, (g, z) in parts.items()}
    last = None if initial_state is None else dinitial.to(initial_state.dtype)
    return {"x": dx, "log_decay": dlog_decay, **summed, "initial_state": last}


selective_scan = register(
    "selective_scan", _compute, _differentiate, lambda args: SelectiveScan(*sizes(args)).results(), results=2
)


def forward(a: Scan) -> tuple[Tensor, Tensor]:
    """y [B,T,D] and the final states [S,D,N]."""
    # fp64 arguments with an x of lower precision: the kernels compute in fp32
    others = (None if z is None else z.float() if z.dtype == torch.float64 else z for z in a[1:6])
    return selective_scan(a.x, *others, a.cu_seqlens)
