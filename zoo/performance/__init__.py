"""Benchmarks of ops (`kernels`), training steps (`training`), generation (`decode`) and several devices (`scaling`)."""

from zoo.performance.command import KINDS, bench

__all__ = ["KINDS", "bench"]
