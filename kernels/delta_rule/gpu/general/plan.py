"""The general delta rule in Triton: the sizes, the layout and the launches of a call."""

from functools import cached_property
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ....core.documents import Documents
from ....gpu.device import HOPPER, capability, multiprocessors
from ....gpu.launch import LaunchSpec, cdiv
from ....gpu.launch_table import LaunchConfig, launch, optional
from ....gpu.layout import CHUNK, layout, most_chunks
from ....gpu.paths import select
from ....gpu.plan import Plan, prepared
from ....gpu.tiles import INTERPRETED
from ..plan import block, key_block
from ..select import GENERAL_CHUNKS, GENERAL_FORWARD, Case
from .gradients import gradients, pairs
from .prepare import prepare
from .scalar_decay import scalar_gradients, scalar_prepare
from .sequential_pass import scan_backward, scan_forward

Shapes = list[tuple[tuple[int, ...], torch.dtype]]


class GeneralDeltaRule(Plan):
    """The plan of a call: M = H·E recurrences over N sequences.

    Args:
        q: Shape of the queries [B,T,G·E,K].
        v: Shape of the values [B,nT,H,V], with n rows per token.
        subheads: Subheads E per head.
        scale: Factor on the output.
        gate: none, constant, head or channel.
        before: Whether the erase keys read the state before it decays.
        product: Whether the erase keys are factors on k.
        dtype: Dtype of q, k and v.
        device: Device of q, k and v.
        documents: Number of documents packed into one row; None without packing.
    """

    def __init__(
        self,
        q: torch.Size,
        v: torch.Size,
        subheads: int,
        scale: float,
        gate: str,
        before: bool,
        product: bool,
        dtype: torch.dtype,
        device: torch.device,
        documents: int | None,
    ):
        super().__init__(dtype, device)
        (self.B, self.T, heads, self.K), (self.rows, self.H, self.V), self.E = q, v[1:], subheads
        self.steps = self.rows // self.T
        self.size = self.K if self.K == 16 else max(self.K, 17)  # of the entries: masked blocks of 16 were not tested
        self.R, self.M = self.H // (heads // subheads), self.H * subheads
        self.scale, self.gate, self.before, self.product = scale, gate, before, product
        self.N, self.slots = self.B if documents is None else documents, most_chunks(self.B, self.rows, documents)
        self.many = self.B  # sequences that launches are chosen by
        self.exact = dtype == torch.float32
        self.cautious = capability(device) != HOPPER  # nothing was run there

    def place(self, packed: Documents | None) -> None:
        """Set the layout: sequences are not cut."""
        self.many = packed.room if packed else self.B
        whole = -(-self.rows // CHUNK) * CHUNK
        self.layout = layout(packed, self.B, self.rows, CHUNK, CHUNK, max(CHUNK, whole), self.device, self.steps)

    @property
    def kept(self) -> Shapes:
        """Shapes and dtypes of what gradients need: all that `prepare` stores, U and the states before all chunks."""
        B, rows, M, K, V, slots, dtype = self.B, self.rows, self.M, self.K, self.V, self.slots, self.dtype
        pair, q, keys = ((slots, M, CHUNK, CHUNK), dtype), ((B, self.T, M, K), dtype), ((B, rows, M, K), dtype)
        total = ((slots, M, K), torch.float32)
        return [pair, pair, q, keys, keys, total, ((B, rows, M, V), dtype), ((slots, M, V, K), dtype)]

    def entry(self, kernel: str) -> LaunchConfig:
        """The launch configuration of a kernel."""
        return launch(f"general_delta_rule.{kernel}", self.size, self.dtype, self.device)

    def pass_entry(self, kernel: str) -> LaunchConfig:
        """The launch configuration of a pass along time."""
        entry = self.entry(kernel)
        narrow = optional("general_delta_rule.narrow", self.size, self.dtype, self.device)
        if kernel == "backward" or narrow is None or self.deterministic:
            return entry
        values = min(block(self.V), entry.values)
        idle = 2 * self.many * self.M * cdiv(self.V, values) <= multiprocessors(self.device)
        return narrow if idle and narrow.values < values else entry

    @property
    def key_part(self) -> tuple[int, int]:
        """Channels in a block of keys of the gradients, and the number of such blocks."""
        kernel = "gradients" if self.per_channel else "scalar_gradients"
        if self.per_channel and self.in_gluon:
            return CHUNK, self.K // CHUNK
        width = 32 if INTERPRETED and self.K <= 32 else self.entry(kernel).keys
        return width, cdiv(self.K, width)

    @property
    def per_channel(self) -> bool:
        """Return whether each channel has a decay of its own."""
        return self.gate == "channel"

    @cached_property
    def forward_path(self) -> str:
        """Name of the path of the forward pass along time."""
        return select(GENERAL_FORWARD, self._case).name

    @property
    def _case(self) -> Case:
        return Case(self.K, self.V, self.dtype, self.device)

    def sums(self) -> Tensor:
        """Memory for the sums of decays in chunks, in fp64 if the op is in fp32."""
        return self.new(self.B, self.rows, self.M, self.K, dtype=torch.float64 if self.exact else torch.float32)

    def states(self) -> Tensor:
        """One uninitialised state per sequence."""
        return self.new(self.N, self.M, self.K, self.V, dtype=torch.float32)

    def _spec(self, kernel: Any, programs: int, *numbers: Any, warps: int, stages: int, **constants: Any) -> LaunchSpec:
        precision = "tf32x3" if self.exact and not INTERPRETED else "ieee"
        options: dict[str, Any] = {"M": self.M, "E": self.E, "STEPS": self.steps, "PRECISION": precision, **constants}
        return LaunchSpec(kernel, programs, *numbers, **options, warps=warps, stages=stages)

    @property
    def _dtype(self) -> Any:
        # Triton's interpreter gets bf16 arithmetic wrong: loads convert to fp32 immediately
        return tl.float32 if self.exact or INTERPRETED else tl.bfloat16

    @property
    def _merge(self) -> str:
        """Precision of the products that make an inverse."""
        return "ieee" if INTERPRETED else "tf32x3" if self.exact else "tf32"

    @property
    def _pairs(self) -> int:
        """Number of pairs of a chunk and a recurrence."""
        return len(self.layout.chunks) * self.M

    @property
    def _over_chunks(self) -> dict[str, Any]:
        return {"R": self.R, "K": self.K, "BEFORE": self.before, "PRODUCT": self.product, "DOT": self._dtype}

    @prepared
    def prepare(self) -> LaunchSpec:
        """The inverse, the scores and the decayed keys and queries: one program per chunk and recurrence."""
        entry = self.entry("prepare")
        keys = self.key_part[0] if self.K % entry.keys else entry.keys
        options = {**self._over_chunks, "BK": keys, "WIDE": self.exact, "MERGE": self._merge}
        return self._spec(prepare, self._pairs, self.scale, **options, warps=entry.warps, stages=entry.stages)

    @cached_property
    def in_gluon(self) -> bool:
        """Return whether kernels in Gluon do the work of the chunks."""
        return self.per_channel and select(GENERAL_CHUNKS, self._case).name == "hopper_chunks"

    def products(self) -> Tensor:
        """Memory for L and P of all chunks."""
        return self.new(2, self.slots, self.M, CHUNK, CHUNK, dtype=torch.float32)

    @prepared
    def pair_products(self) -> LaunchSpec:
        """Compute what `prepare` does except for the inverse, in Gluon."""
        from .hopper_chunks import pair_products  # the interpreter does without Gluon

        programs = min(self._pairs, 2 * multiprocessors(self.device))  # which go from pair to pair
        return self._over_tiles(pair_products, programs, self.scale, self._pairs, self.slots * self.M)

    @prepared
    def solve_pairs(self) -> LaunchSpec:
        """The inverse and the scores, after `pair_products`."""
        from .hopper_solve import solve_pairs

        return LaunchSpec(solve_pairs, self._pairs, self.slots * self.M, warps=4)

    @prepared
    def block_gradients(self) -> LaunchSpec:
        """The gradients of keys, queries and gates in Gluon."""
        from .hopper_chunks import gradients as of_block

        programs = self._pairs * (self.K // CHUNK)
        return self._over_tiles(of_block, programs, self.scale, self.B * self.rows, V=self.V)

    def _over_tiles(self, kernel: Any, programs: int, *numbers: Any, **constants: Any) -> LaunchSpec:
        options: dict[str, Any] = {"M": self.M, "E": self.E, "R": self.R, "STEPS": self.steps, "K": self.K, **constants}
        options |= {"BEFORE": self.before, "PRODUCT": self.product}
        return LaunchSpec(kernel, programs, *numbers, **options, warps=8, registers=128)  # two on a multiprocessor

    @prepared
    def scalar_prepare(self) -> LaunchSpec:
        """Prepare chunks as `prepare` does, for one decay per head."""
        entry = self.entry("scalar_prepare")
        keys = min(entry.keys, key_block(self.K))
        options = {**self._over_chunks, "GATE": self.gate, "BK": keys, "MERGE": self._merge}
        return self._spec(scalar_prepare, self._pairs, self.scale, **options, warps=entry.warps, stages=entry.stages)

    def _along_time(self, kernel: Any, entry: LaunchConfig) -> LaunchSpec:
        """One program per sequence, recurrence and block of values."""
        BV, stages = min(block(self.V), entry.values), entry.stages
        sizes: dict[str, Any] = {"K": self.K, "V": self.V, "BK": entry.keys or key_block(self.K), "BV": BV}
        sizes["DTYPE"] = self._dtype
        programs = self.N * self.M * cdiv(self.V, BV)
        return self._spec(kernel, programs, **sizes, STAGES=stages, warps=entry.warps, stages=stages)

    @prepared
    def forward(self) -> LaunchSpec:
        """The pass along time."""
        if self.forward_path == "hopper_pass":
            from .hopper_sequential_pass import scan_forward as in_gluon  # the interpreter does without Gluon

            sizes: dict[str, Any] = {"M": self.M, "E": self.E, "STEPS": self.steps, "V": self.V}
            return LaunchSpec(in_gluon, self.N * self.M * (self.V // 64), **sizes, warps=4)
        return self._along_time(scan_forward, self.pass_entry("forward"))

    @prepared
    def backward(self) -> LaunchSpec:
        """The reverse pass along time."""
        return self._along_time(scan_backward, self.pass_entry("backward"))

    @prepared
    def pairs(self) -> LaunchSpec:
        """The gradients of P and L: one program per chunk and recurrence."""
        entry = self.entry("pairs")
        sizes: dict[str, Any] = {"V": self.V, "BV": min(entry.values, block(self.V)), "DTYPE": self._dtype}
        sizes |= {"GATE": self.gate, "BEFORE": self.before}
        return self._spec(pairs, self._pairs, self.scale, **sizes, warps=entry.warps, stages=entry.stages)

    @prepared
    def gradients(self) -> LaunchSpec:
        """The gradients of keys, queries, gates: one program per chunk, recurrence and block of keys."""
        return self._of_keys(gradients, "gradients", WIDE=self.exact)

    @prepared
    def scalar_gradients(self) -> LaunchSpec:
        """The gradients, as from `gradients`, for one decay per head."""
        return self._of_keys(scalar_gradients, "scalar_gradients", GATE=self.gate)

    def _of_keys(self, kernel: Any, name: str, **constants: Any) -> LaunchSpec:
        """One program per chunk, recurrence and block of keys."""
        entry, (keys, parts) = self.entry(name), self.key_part
        sizes = {**self._over_chunks, "BK": keys, "V": self.V, "BV": min(entry.values, block(self.V)), **constants}
        if self.exact and self.cautious:
            sizes["PRECISION"] = "ieee"  # three parts of fp32 numbers do not fit into the shared memory
        sizes |= {"STAGES": entry.stages, "warps": entry.warps, "stages": entry.stages}
        return self._spec(kernel, self._pairs * parts, self.scale, self.B * self.rows, **sizes)
