"""The kernel paths of the delta rule: which kernels run for a call, in each of its three stages."""

from typing import NamedTuple

import torch

from ...core.recurrence import one_token
from ...gpu.device import multiprocessors, runs_gluon
from ...gpu.paths import KernelPath, always
from .. import WHOLE, general

GLUON_SIZE = 128  # channels of keys (for all gradients in one pass, of values too) of the kernels in Gluon
FULL = 0.6  # share of the device that its programs must fill: with half of it, three passes are as fast


class Case(NamedTuple):
    """The quantities that the choice depends on."""

    K: int
    V: int
    dtype: torch.dtype
    device: torch.device
    programs: int = 0  # recurrences, times segments of all sequences
    halvable: bool = False  # whether sequences are whole rows, long enough to be cut into halves
    stored: bool = True  # whether the scores are in memory: for gradients or deterministic mode
    filled: bool = False  # whether to choose as if the programs filled the device, however many there are
    narrow: bool = False  # whether wide blocks of values leave half of the device idle, and narrow ones have a launch

    @property
    def gluon(self) -> bool:
        """Return whether there are kernels in Gluon for these keys."""
        return self.K == GLUON_SIZE and self.dtype == torch.bfloat16 and runs_gluon(self.device)

    @property
    def gluon_chunks(self) -> bool:
        """Return whether kernels in Gluon do the work of chunks with decays per channel."""
        return self.K % 64 == self.V % 64 == 0 and self.dtype == torch.bfloat16 and runs_gluon(self.device)

    @property
    def gluon_backward(self) -> bool:
        """Return whether a kernel in Gluon computes all gradients in one pass."""
        return self.gluon and self.V == GLUON_SIZE

    def fills(self, times: int = 1) -> bool:
        """Return whether `times` as many programs, one per multiprocessor, keep the share `FULL` of all waves busy."""
        if self.filled:
            return True
        programs, places = times * self.programs, multiprocessors(self.device)
        return programs >= FULL * -(-programs // places) * places


ONE_TOKEN = KernelPath(
    "one_token",
    when=lambda a: one_token(a) and not a.differentiated,
    why="one token per sequence, no gradients: a single launch reads and writes each state once",
)
GENERAL = KernelPath(
    "general",
    when=general,
    why="erase keys of their own, decays per channel or reads before the decay: every recurrence for itself, decays "
    "per channel by halves, in the same time for any decay",
)
PREPARE = (
    KernelPath(
        "hopper_prepare", when=lambda case: case.gluon, why="keys of 128 channels in bf16 on Hopper: a kernel in Gluon"
    ),
    KernelPath("prepare", when=always, why="all other keys"),
)
GENERAL_CHUNKS = (
    KernelPath(
        "hopper_chunks",
        when=lambda case: case.gluon_chunks,
        why="decays per channel, keys and values of multiples of 64 channels in bf16 on Hopper: kernels in Gluon",
    ),
    KernelPath("chunks", when=always, why="all other sizes"),
)
GENERAL_FORWARD = (
    KernelPath(
        "hopper_pass",
        when=lambda case: case.gluon and case.V % 64 == 0,
        why="keys of 128 channels in bf16 on Hopper: a kernel in Gluon",
    ),
    KernelPath("pass", when=always, why="all other keys"),
)
FORWARD = KernelPath(
    "hopper_pass",
    when=lambda case: case.gluon and case.V % 64 == 0 and not case.narrow,
    why="outputs for keys of 128 channels in bf16 on Hopper: a kernel in Gluon",
)
SCORES = KernelPath(
    "scores_in_pass",
    when=lambda case: not case.stored,
    why="no scores are stored for gradients: the kernel of `hopper_pass` computes them, instead of reading them",
)
SEQUENTIAL = (
    KernelPath(
        "long_keys",
        when=lambda case: case.K > WHOLE,
        why=f"more than {WHOLE} channels of keys: the state stays in memory",
    ),
    KernelPath(
        "narrow_blocks",
        when=lambda case: case.narrow,
        why="whole sequences that would leave most of the device idle: narrow blocks of values, more programs",
    ),
    KernelPath("wide_blocks", when=always, why="everything else"),
)
BACKWARD = (
    KernelPath(
        "one_pass",
        when=lambda case: case.gluon_backward and case.fills(),
        why="K = V = 128 in bf16 on Hopper, and enough programs to fill the device: all gradients in one pass in Gluon",
    ),
    KernelPath(
        "one_pass_in_halves",
        when=lambda case: (
            case.gluon_backward
            and case.halvable
            and 2 * case.programs <= multiprocessors(case.device)
            and case.fills(2)
        ),
        why="the same sizes, with programs for half of the device: the second halves of all sequences run at the same "
        "time as the first, from gradients between them that an extra pass computes",
    ),
    KernelPath(
        "three_passes",
        when=always,
        why="everything else: a sequential pass, then the gradients of queries and of keys of all chunks in parallel",
    ),
)
