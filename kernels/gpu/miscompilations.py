"""Launches that compilers are known to turn into wrong code on Hopper. The launch table has none.

A row names the numbers of an entry that make the pattern; numbers that it leaves out do not matter. Reports about
Triton are public; what has no number there was found on an H100 with outputs and gradients of these kernels.
"""

from collections.abc import Mapping
from typing import NamedTuple

HOPPER = 9  # major compute capability


class Miscompilation(NamedTuple):
    """A pattern that is compiled to wrong code.

    Attributes:
        says: What goes wrong.
        versions: Versions of Triton, up to the second number, in which it was seen.
        kernels: Names of the kernels that have the pattern, with these numbers.
        numbers: Numbers of an entry that make it; none if it is a matter of the kernel's code.
    """

    says: str
    versions: tuple[str, ...]
    kernels: tuple[str, ...] = ()
    numbers: Mapping[str, int] = {}

    def is_of(self, kernel: str, entry: Mapping[str, int]) -> bool:
        """Return whether a launch has the pattern."""
        return kernel in self.kernels and all(entry.get(name) == number for name, number in self.numbers.items())


BLOCKS = tuple(f"linear_recurrence.{name}" for name in ("carry", "local", "channel_scores", "channel_grads"))
ALONG_TIME = tuple(f"delta_rule.{name}" for name in ("forward", "backward", "narrow"))
OVER_CHUNKS = tuple(f"delta_rule.{name}" for name in ("dq", "dk"))
KNOWN = (
    Miscompilation(
        "a transposed product as an operand of a product gives wrong gradients (FLA #640); our kernels transpose only "
        "what they have loaded",
        ("3.4", "3.5", "3.6", "3.7"),
    ),
    Miscompilation(
        "a product as an operand of a product, over 32 key channels by 4 warps, reads shared memory out of bounds "
        "(triton #11366)",
        ("3.6", "3.7"),
        ("delta_rule.dq",),
        {"keys": 32, "warps": 4},
    ),
    Miscompilation(
        "keys of 16 next to values of 64 give wrong gradients", ("3.6",), OVER_CHUNKS, {"keys": 16, "values": 64}
    ),
    Miscompilation(
        "keys of 32 next to values of 64 give wrong gradients", ("3.6",), OVER_CHUNKS, {"keys": 32, "values": 64}
    ),
    Miscompilation(
        "blocks of 32 with 4 warps and 1 stage are wrong", ("3.6",), BLOCKS, {"block": 32, "warps": 4, "stages": 1}
    ),
    Miscompilation(
        "blocks of 32 with 8 warps and 1 stage access memory illegally",
        ("3.6",),
        BLOCKS,
        {"block": 32, "warps": 8, "stages": 1},
    ),
    Miscompilation(
        "32 values with 4 warps and 1 stage are wrong", ("3.6",), ALONG_TIME, {"values": 32, "warps": 4, "stages": 1}
    ),
    Miscompilation("16 values with 3 stages are wrong", ("3.6",), ALONG_TIME, {"values": 16, "stages": 3}),
    Miscompilation(
        "32 values with 2 stages are wrong where the state stays in memory",
        ("3.6",),
        ("delta_rule.long",),
        {"values": 32, "stages": 2},
    ),
)


def miscompiled(kernel: str, entry: Mapping[str, int], capability: int) -> Miscompilation | None:
    """The known pattern that a launch has on a GPU of this major compute capability; None if it has none.

    Whatever version of Triton is installed: a table is for all of them, and none is known to be right.
    """
    if capability != HOPPER:
        return None
    return next((pattern for pattern in KNOWN if pattern.is_of(kernel, entry)), None)


def known_of(version: str) -> list[Miscompilation]:
    """The patterns that were seen in a version of Triton."""
    return [pattern for pattern in KNOWN if ".".join(version.split(".")[:2]) in pattern.versions]
