"""The kernel paths of the linear recurrence: which kernels run for a call."""

from typing import NamedTuple

import torch

from ...core.recurrence import one_token
from ...gpu.device import multiprocessors, runs_gluon
from ...gpu.paths import KernelPath, always

GLUON_SIZE = 128  # channels of keys and of values that the kernels in Gluon are written for
GLUON_KEYS = (64, GLUON_SIZE)  # channels of keys with a decay per channel
GLUON_VALUES = (64, GLUON_SIZE)  # channels of values with other decays
FEW_SLICES = 2


class Case(NamedTuple):
    """The quantities that the choice depends on."""

    gate: str  # none, constant, head or channel
    beta: bool  # whether there are input gates
    K: int
    V: int
    dtype: torch.dtype
    device: torch.device
    backward: bool = False
    gate_gradients: bool = False  # whether log_decay or beta needs a gradient
    slices: int = 0  # number of programs that a state is divided among; 0 where the choice does not depend on it
    blocks: int = 0  # number of recurrences, times 512-token blocks of all rows

    @property
    def gluon(self) -> bool:
        """Return whether there are kernels in Gluon for these sizes."""
        channel = self.gate == "channel"
        keys, values = (GLUON_KEYS, (GLUON_SIZE,)) if channel else ((GLUON_SIZE,), GLUON_VALUES)
        sizes = self.K in keys and self.V in values and self.dtype == torch.bfloat16
        return sizes and not (channel and self.beta) and runs_gluon(self.device)


ONE_TOKEN = KernelPath(
    "one_token",
    when=lambda a: one_token(a) and not a.differentiated,
    why="one token per sequence, no gradients: a single launch reads and writes each state once",
)
PATHS = (
    KernelPath(
        "hopper_vector_decay",
        when=lambda case: case.gate == "channel" and case.gluon,
        why="a decay per channel on Hopper, K = 64 or parts of 128, V from 64 in parts of 128, bf16, no β: one pass "
        "forward and one backward",
    ),
    KernelPath(
        "vector_decay",
        when=lambda case: case.gate == "channel",
        why="any other decay per channel: the scores of all chunks, then sequential passes",
    ),
    KernelPath(
        "hopper_scalar_decay",
        when=lambda case: case.backward and case.gluon and case.blocks >= multiprocessors(case.device) // 2,
        why="backward on Hopper, K = 128, V = 64 or 128, bf16, enough programs for half of the GPU: one pass computes "
        "all gradients",
    ),
    KernelPath(
        "scores_in_pass",
        when=lambda case: not case.gate_gradients and case.slices <= FEW_SLICES,
        why="no gradients of gates, and a state is divided among at most 2 programs: sequential passes compute the "
        "scores of their chunks",
    ),
    KernelPath(
        "scores_first", when=always, why="everything else: the gates and scores of all chunks, then sequential passes"
    ),
)
