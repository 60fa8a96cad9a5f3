"""The kernel path of gated MLPs in which one launch computes a matrix product and what follows it elementwise."""

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.deterministic import is_deterministic
from ...gpu.device import multiprocessors, runs_gluon
from ...gpu.paths import KernelPath

WIDTH = 128  # columns of a tile
ROWS_FORWARD, ROWS_BACKWARD = WIDTH, 2 * WIDTH  # of a tile
UNIT = 8  # numbers in bf16: TMA requires that rows begin at multiples of 16 bytes
# In training on an H200, the kernels gained nothing with fewer tiles per multiprocessor, nothing forward with 2,048
# inputs, and nothing backward with 512 outputs.
TILES, LONGEST_FORWARD, SHORTEST_BACKWARD = 5, 1024, 1024


class Case(NamedTuple):
    """The quantities that the choice depends on."""

    tensors: tuple[Tensor, ...]
    rows: int
    inner: int  # channels that the product sums over
    size: int  # channels of gate, and of up
    backward: bool
    cast: torch.dtype | None = None  # dtype of autocast, if it is on

    @property
    def fits(self) -> bool:
        """Return whether the kernels are made for the tensors and their sizes."""
        first, sizes = self.tensors[0], self.inner > 0 and self.inner % UNIT == 0 and self.size % WIDTH == 0
        # autocast does not cast fp64
        dtypes = {x.dtype if x.dtype == torch.float64 else self.cast or x.dtype for x in self.tensors}
        return sizes and dtypes == {torch.bfloat16} and all(x.device == first.device for x in self.tensors)

    @property
    def pays(self) -> bool:
        """Return whether the kernels are faster than a product and an elementwise kernel."""
        tile = ROWS_BACKWARD if self.backward else ROWS_FORWARD
        tiles = -(-self.rows // tile) * (self.size // WIDTH)
        long_enough = self.inner >= SHORTEST_BACKWARD if self.backward else self.inner <= LONGEST_FORWARD
        return long_enough and tiles >= TILES * multiprocessors(self.tensors[0].device)


FUSED = KernelPath(
    "fused_gate",
    when=lambda case: (
        runs_gluon(case.tensors[0].device)
        and case.fits
        and (is_deterministic() or case.pays)  # in deterministic mode, whatever the number of rows
    ),
    why="bf16 on Hopper, a multiple of 128 inner channels and of 8 others and, except in deterministic mode, at least "
    "five tiles per multiprocessor, and at most 1,024 inputs forward or at least 1,024 outputs backward: a kernel in "
    "Gluon computes a product and the gate, or the gradients of both",
)
