"""Which sample comes when: a pure function of one integer, the number of samples seen by all ranks together."""

import numpy as np

_ROUNDS = 6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def shuffled(positions: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Sample indices at positions of an endless stream, in which each `size` positions are a new permutation.

    A keyed Feistel network over the next power of four, walked until it lands below `size`: no memory, any position
    at once, and (unlike a library's shuffle) the same order in every version, so that old runs can be resumed.

    Args:
        positions: `[n]` integers ≥ 0.
        size: number of samples.
        seed: which order.

    Returns:
        `[n]` int64 in [0, size).
    """
    epoch, index = np.divmod(np.asarray(positions, np.uint64), np.uint64(size))
    keys = _mix(_mix(np.full_like(epoch, seed & 0xFFFFFFFFFFFFFFFF)) + epoch * _GOLDEN)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    waiting = np.ones(index.shape, bool)
    while waiting.any():
        left, right = index[waiting] >> half, index[waiting] & mask
        key = keys[waiting]
        for _ in range(_ROUNDS):
            key = key + _GOLDEN
            left, right = right, left ^ (_mix(right + key) & mask)
        index[waiting] = (left << half) | right
        waiting &= index >= size
    return index.astype(np.int64)


def random_bits(numbers: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`[n, count]` random uint64; row i is a function of `seed` and of `numbers[i]` alone (splitmix64 streams)."""
    start = _mix(
        _mix(np.full(len(numbers), seed & 0xFFFFFFFFFFFFFFFF, np.uint64)) + numbers.astype(np.uint64) * _GOLDEN
    )
    return _mix(start[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, on uint64 (overflow is meant)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
