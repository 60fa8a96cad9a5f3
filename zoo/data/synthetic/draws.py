"""Random draws for numbered samples: row i is a function of the seed and of the sample's number alone."""

import numpy as np

from zoo.data.order import random_bits, shuffled


def whole(numbers: np.ndarray, count: int, below: int, seed: int) -> np.ndarray:
    """`[n, count]` int64, uniform in 0 … below − 1."""
    return (random_bits(numbers, count, seed) % np.uint64(below)).astype(np.int64)


def real(numbers: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`[n, count]` float64, uniform in (0, 1)."""
    return ((random_bits(numbers, count, seed) >> np.uint64(11)).astype(float) + 0.5) / 2.0**53


def distinct(numbers: np.ndarray, count: int, size: int, seed: int) -> np.ndarray:
    """For each number, the first `count` entries of a separate permutation of 0 … size − 1, `[n, count]` int64."""
    positions = numbers[:, None] * np.uint64(size) + np.arange(count, dtype=np.uint64)
    return shuffled(positions.ravel(), size, seed).reshape(positions.shape)


def slots(numbers: np.ndarray, count: int, size: int, power: float, seed: int) -> np.ndarray:
    """For each number, `count` of 0 … size − 1 without replacement, s with probability ∝ (s + 1)^(power − 1).

    These are the first arrivals, at exponential times with the weights as rates, `[n, count]` int64 in their order.
    """
    times = -np.log(real(numbers, size, seed)) * np.arange(1.0, size + 1) ** (1 - power)
    return np.argsort(times, axis=1)[:, :count]
