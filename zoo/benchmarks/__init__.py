"""Benchmarks: of the ops (`kernels`), of training steps (`training`), of generation (`decode`), and of several devices
(`scaling`)."""

from zoo.benchmarks.run import KINDS, bench

__all__ = ["KINDS", "bench"]
