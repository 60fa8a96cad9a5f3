"""The selective scan in Triton: which kernels run, in which order, on which tensors.

A program walks through a block of a sequence: all of it if the batch and its channels are enough to fill a device.
Forward: the states at the cuts between blocks, then all blocks in parallel; the states before all chunks are saved.
Backward: the gradients of the states at the cuts, then all blocks in parallel. A sequence of a single chunk, such as a
decoded token, takes one launch. There are no atomics, so results repeat to the bit.
"""

from functools import reduce
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

CHUNK = 64  # tokens per saved state
STATES = 16384  # programs, times up to 16 states per channel, that fill a device
FEW = 1056  # programs that an H200 runs together even if each thread of them has 255 registers
BLOCKS = 128  # most blocks of a sequence that are combined quickly
TOKENS, GRADIENT_TOKENS = 4, 4  # tokens that are loaded together; twice as many by few or small programs that walk
LANES = 32  # threads of a program


class SelectiveScan(Plan):
    """The plan of a call over S sequences, which have at most `slots` chunks.

    Args:
        shape: Shape of x [B,T,D].
        states: States N per channel.
        scaled: Whether inputs are scaled by the steps.
        documents: Number of documents packed into one row; None without packing.
        x: Dtype and device of x.
    """

    def __init__(self, shape: torch.Size, states: int, scaled: bool, documents: int | None, *x: Any):
        super().__init__(*x)
        (self.B, self.T, self.D), self.N, self.scaled = shape, states, scaled
        # channels and states of a tile, in registers and in lanes; see `chunks.py`
        padded = next_power_of_2(states)
        LN = min(max(4, padded // 16), padded, LANES)
        NJ, LD = padded // LN, LANES // LN
        self.tile = {"DP": 2 if NJ <= 8 and LD <= 8 else 1, "NJ": NJ, "LN": LN, "LD": LD}
        self.columns = cdiv(self.D, self.tile["DP"] * LD)  # blocks of channels, one per program
        self.length = CHUNK if self.deterministic else self._length()
        self.per_row = cdiv(self.T, self.length)
        # every sequence is a single block; not in deterministic mode, since states that are combined round differently
        self.whole = documents is None and self.per_row == 1 and not self.deterministic
        self.short = self.whole and self.T <= CHUNK  # every sequence is a single chunk
        self.S = self.B if documents is None else documents
        self.slots = self.B * cdiv(self.T, CHUNK) if documents is None else self.T // CHUNK + documents

    def _length(self) -> int:
        """Tokens per block: whole sequences if their programs fill a device, since cuts require a second walk.

        Otherwise sequences are cut for four times as many programs, which is faster than for just enough of them.
        """
        states = max(1, self.B * self.columns) * min(next_power_of_2(self.N), 16)
        count = 1 if states >= STATES else min(cdiv(4 * STATES, states), BLOCKS)
        return cdiv(cdiv(self.T, count), CHUNK) * CHUNK

    def place(self, packed: Documents | None) -> None:
        longest = self.per_row * self.length
        self.layout = layout(packed, self.B, self.T, CHUNK, self.length, longest, self.device)
        self.blocks = self.layout.blocks.shape[0]

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        """Uninitialised y, final states, and states before all chunks (none if every sequence is one chunk)."""
        y, final = self.new(self.B, self.T, self.D), self.states(self.S)
        return y, final, self.states(0 if self.short else self.slots)

    def states(self, count: int) -> Tensor:
        return self.new(count, self.D, self.N, dtype=torch.float32)

    def _prepared(self, kernel: Any, rows: int, *numbers: int, **constants: Any) -> LaunchSpec:
        """One program per row of states and block of channels."""
        sizes: dict[str, Any] = {"D": self.D, "N": self.N, **self.tile}
        return LaunchSpec(kernel, rows * self.columns, *numbers, **sizes, **constants, warps=1)

    @property
    def tokens(self) -> int:
        """Tokens that programs load together as they walk. In deterministic mode they depend on N alone."""
        if self.whole and self.T == 1:
            return 1
        few = not self.deterministic and self.B * self.per_row * self.columns <= FEW
        return 2 * TOKENS if few or self.N < 16 else TOKENS

    @prepared
    def walk(self, reverse: bool) -> LaunchSpec:
        """Through each block from the state before it, or in reverse from the gradient after it."""
        constants = {"CHUNK": CHUNK, "TOKENS": self.tokens, "REVERSE": reverse, "SCALED": self.scaled}
        return self._prepared(walk, self.blocks, **constants, overlap=self.T == 1)

    @prepared
    def combine(self, reverse: bool) -> LaunchSpec:
        """From what each block adds to the states before all blocks, or in reverse the gradients after them."""
        return self._prepared(combine, self.S, self.length, REVERSE=reverse)

    @property
    def marks(self) -> int:
        """States of a chunk that a program stores to compute gradients: one before every few tokens."""
        return cdiv(min(self.T, CHUNK), GRADIENT_TOKENS)

    @prepared
    def gradients(self) -> LaunchSpec:
        """The gradients of all tensors, from the states before all chunks and the gradients after all blocks."""
        numbers = self.B * self.T, self.marks
        constants = {"CHUNK": CHUNK, "TOKENS": GRADIENT_TOKENS, "SCALED": self.scaled}
        return self._prepared(gradients, self.blocks, *numbers, **constants)


def sizes(a: Scan) -> tuple[Any, ...]:
    """The arguments of the plan."""
    documents = None if a.cu_seqlens is None else a.cu_seqlens.shape[0] - 1
    return a.x.shape, a.rate.shape[1], a.scale_inputs, documents, a.x.dtype, a.x.device


def _plan_of(a: Scan) -> SelectiveScan:
    return SelectiveScan.of(a.cu_seqlens, a.x.shape[1], *sizes(a))


def _dense(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x.contiguous() for x in tensors]


def _inputs(a: Scan) -> tuple[list[Any], Tensor | None]:
    """x, log_decay, rate, b, c twice, per token and constant, one of which is None, and skip; and the initial state."""
    *inputs, c, initial, skip = _dense(*a[:7])
    return [*inputs, *((None, c) if c is not None and c.dim() == 2 else (c, None)), skip], initial


def cuts(plan: SelectiveScan, reverse: bool, inputs: list[Any], *ends: Any) -> Tensor:
    """Return the states before all blocks, or in reverse the gradients after them.

    Args:
        plan: Sizes and launches.
        reverse: Whether it is about the gradients.
        inputs: What the kernel reads of each token, and constants.
        ends: The states at the first end, or None, and those at the other end, which are filled.
    """
    states, totals = plan.states(plan.blocks), plan.new(plan.blocks, plan.D, dtype=torch.float32)
    plan.walk(reverse)(*inputs, None, states, totals, None, None, plan.layout.blocks)
    plan.combine(reverse)(inputs[2], states, totals, *ends, plan.layout.segments)
    return states


def _compute(args: Scan) -> tuple[Tensor, Tensor, Tensor]:
    plan, (inputs, initial) = _plan_of(args), _inputs(args)
    y, final, states = plan.results()
    before = initial if plan.whole else cuts(plan, False, [*inputs[:4], None, None, None], initial, final)
    ends = final if plan.whole else None, None, None if plan.short else states
    plan.walk(False)(*inputs, before, *ends, y, plan.layout.blocks)
    return y, final, states


def _differentiate(args: Scan, needed: Any, dy: Tensor | None, dfinal: Tensor | None, states: Tensor) -> Gradients:
    plan, (x, log_decay, rate, b, c, initial_state, skip, *_) = _plan_of(args), args
    inputs, initial = _inputs(args)
    dy, dfinal = _dense(torch.zeros_like(x) if dy is None else dy, dfinal)
    dinitial = plan.states(plan.S)
    first, after = initial if plan.short else states, dfinal
    if not plan.whole:
        _, g, r, _, each, constant, _ = inputs
        after = cuts(plan, True, [dy, g, r, each, None, constant, None], dfinal, dinitial)
    programs, channels = plan.blocks * plan.columns, plan.tile["DP"] * plan.tile["LD"]
    scratch = plan.new(programs, plan.marks, channels, next_power_of_2(plan.N), dtype=torch.float32)
    dx, dlog_decay = plan.new(*x.shape), plan.new(*log_decay.shape, dtype=log_decay.dtype)
    drate = plan.states(plan.blocks) if needed.rate else None
    summed = {name: z for name, z in {"b": b, "c": c}.items() if z is not None and z.dim() == 3}
    shape = (plan.columns, len(summed), plan.B, plan.T, plan.N)
    parts = plan.new(*shape, dtype=torch.float32) if summed else None
    dread = plan.states(plan.blocks) if c is not None and c.dim() == 2 else None
    dskip = None if skip is None else plan.new(plan.blocks, plan.D, dtype=torch.float32)
    tensors = (first, after, dy, scratch, dx, dlog_decay, drate, parts, dread, dskip, dinitial if plan.whole else None)
    plan.gradients()(*inputs, *tensors, plan.layout.blocks)
    learned: dict[str, Tensor] = {}
    if parts is not None:
        sums = add_outer(parts, reduce(torch.promote_types, (z.dtype for z in summed.values()))).unbind()
        learned = {name: g.to(z.dtype) for (name, z), g in zip(summed.items(), sums, strict=True)}
    for name, z, of_blocks in (("rate", rate, drate), ("c", c, dread), ("skip", skip, dskip)):
        if of_blocks is not None and z is not None:
            learned[name] = add_parts(of_blocks.flatten(1)[:, None], z.dtype).view(z.shape)
    last = None if initial_state is None else dinitial.to(initial_state.dtype)
    return {"x": dx, "log_decay": dlog_decay, **learned, "initial_state": last}


selective_scan = register(
    "selective_scan", _compute, _differentiate, lambda args: SelectiveScan(*sizes(args)).results(), results=2
)


def forward(a: Scan) -> tuple[Tensor, Tensor]:
    """y [B,T,D] and the final states [S,D,N]."""
    # fp64 arguments with an x of lower precision: the kernels compute in fp32
    others = (None if z is None else z.float() if z.dtype == torch.float64 else z for z in a[1:7])
    return selective_scan(a.x, *others, a.cu_seqlens, a.scale_inputs)
