"""The kernel path of gated MLPs in which one launch computes a matrix product and what follows it elementwise."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.deterministic import is_deterministic
from ...gpu.device import multiprocessors, runs_gluon
from ...gpu.paths import KernelPath

WIDTH, INNER = 128, 64  # columns of a tile, and channels of a step of the sum
ROWS_FORWARD, ROWS_BACKWARD = WIDTH, 2 * WIDTH  # of a tile
UNIT = 8  # numbers in bf16: TMA requires that rows begin at multiples of 16 bytes


class Case(NamedTuple):
    """The quantities that the choice depends on."""

    tensors: tuple[Tensor, ...]
    rows: int
    inner: int  # channels that the product sums over
    size: int  # channels of gate, and of up
    tile: int  # rows of a tile
    cast: torch.dtype | None = None  # dtype of autocast, if it is on

    @property
    def fits(self) -> bool:
        """Return whether the kernels are made for the tensors and their sizes."""
        first, sizes = self.tensors[0], self.inner > 0 and self.inner % UNIT == 0 and self.size % WIDTH == 0
        # autocast does not cast fp64
        dtypes = {x.dtype if x.dtype == torch.float64 else self.cast or x.dtype for x in self.tensors}
        return sizes and dtypes == {torch.bfloat16} and all(x.device == first.device for x in self.tensors)

    @property
    def fills(self) -> bool:
        """Return whether there is a tile for every multiprocessor."""
        return -(-self.rows // self.tile) * (self.size // WIDTH) >= multiprocessors(self.tensors[0].device)


FUSED = KernelPath(
    "fused_gate",
    when=lambda case: runs_gluon(case.tensors[0].device) and not is_deterministic() and case.fits and case.fills,
    why="bf16 on Hopper with a multiple of 128 channels inside and of 8 outside, and a tile for every multiprocessor: "
    "a kernel in Gluon computes a product and the gate; in the backward pass, the gradients of both",
)
