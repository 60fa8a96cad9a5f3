"""Benchmarks of ops (`kernels`), training steps (`training`) and generation (`decode`)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.performance.command import KINDS, bench

__all__ = ["KINDS", "bench"]


def __getattr__(name: str) -> Any:
    # the command imports Lightning, which takes longer than what processes of the doctor import
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from zoo.performance import command

    return getattr(command, name)
