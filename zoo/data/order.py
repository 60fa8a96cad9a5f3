"""Which sample comes when: a pure function of one integer, the number of samples seen by all ranks together."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_ROUNDS = 6
_STRETCH = 128  # positions within which the order of the sources is shuffled
_FINEST = 1 << 30  # no share is finer than one part in so many; products with it stay below 2^63
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


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to weights above 0: exactly where they have few digits, else to one part in 2^30."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) <= _FINEST:
        return whole
    return [max(1, round(weight * _FINEST / sum(exact))) for weight in exact]


def interleaved(positions: np.ndarray, weights: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Which source comes at positions of an endless stream, and which of that source's own samples it is.

    The first source takes its share of the positions as evenly spaced as can be, the second its share of those left,
    and so on. So after any number n of positions a source of the share p has come p·n times, to within 2; that is
    counted in closed form, so any position is found at once. Within each 128 positions their order is then shuffled:
    evenly spaced sources would keep step with the ranks and batches.

    Args:
        positions: `[n]` integers ≥ 0.
        weights: whole numbers ≥ 1 of `whole_weights`.
        seed: of the order within 128 positions.

    Returns:
        `[n]` int64 source and `[n]` int64 number: each source's numbers are 0, 1, 2 … without a gap, but for those
        that other positions of the same 128 hold.
    """
    stretch = np.asarray(positions, np.int64) // _STRETCH
    left = stretch * _STRETCH + shuffled(positions, _STRETCH, seed)
    sources, numbers = np.full_like(left, len(weights) - 1), np.empty_like(left)
    rest, here = sum(weights), np.arange(len(left))  # whose positions are still to be given away
    for source, weight in enumerate(weights[:-1]):
        before = _taken(left, weight, rest)
        own = _taken(left + 1, weight, rest) > before
        sources[here[own]], numbers[here[own]] = source, before[own]
        left, here = (left - before)[~own], here[~own]
        rest -= weight
    numbers[here] = left
    return sources, numbers


def _taken(count: np.ndarray, weight: int, rest: int) -> np.ndarray:
    """How many of the first `count` positions a source with `weight` of `rest` has: the nearest whole number."""
    rounds, more = np.divmod(count, rest)
    return rounds * weight + (more * weight + rest // 2) // rest


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
