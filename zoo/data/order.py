"""The order of samples, as a pure function of one integer: the number of samples seen by all ranks together.

Also random draws for numbered samples: row i is a function of the seed and of the sample's number alone.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

_ROUNDS = 6
_STRETCH = 128  # number of positions within which the order of the sources is shuffled
_RESOLUTION = 1 << 30  # of shares; products with it stay below 2^63
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def shuffled(positions: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Sample indices, [n] int64 below `size`, at positions [n] of an endless stream; each pass is a new permutation.

    A keyed Feistel network over the next power of four, iterated until the result is below `size`. It needs no memory,
    gives random access, and (unlike a library's shuffle) the same order in every version, so that old runs can resume.
    """
    epoch, index = np.divmod(np.asarray(positions, np.uint64), np.uint64(size))
    keys = _mixed(_mixed(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64)) + epoch * _GOLDEN)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    steps = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN
    result = np.empty(index.shape, np.int64)
    places: Any = slice(None)  # those of `index` in the result
    while len(index):
        left, right = index >> half, index & mask
        for step in steps:
            drawn = _mixed(right + keys + step)
            drawn &= mask
            drawn ^= left
            left, right = right, drawn
        left <<= half
        left |= right
        result[places] = left  # what is outside is overwritten in the next round
        outside = np.flatnonzero(left >= size)  # `take` is several times as fast as a mask
        places = outside if isinstance(places, slice) else places.take(outside)
        index, keys = left.take(outside), keys.take(outside)
    return result


def whole_weights(weights: Sequence[float]) -> list[int]:
    """Integers in proportion to positive weights: exact if the weights have few digits, else to one part in 2^30."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * common) for weight in exact]
    divisor = math.gcd(*whole)
    whole = [weight // divisor for weight in whole]
    if sum(whole) <= _RESOLUTION:
        return whole
    return [max(1, round(weight * _RESOLUTION / sum(exact))) for weight in exact]


def interleaved(positions: np.ndarray, weights: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The source at each position of an endless stream, and the number of its sample there: [n] → twice [n] int64.

    The first source takes its share of the positions, spaced as evenly as possible, the second its share of those left,
    and so on. So among the first n positions a source with share p has p·n, to within 2; the count has a closed form,
    which gives random access. Within each 128 positions the order is then shuffled, because evenly spaced sources could
    stay in phase with ranks and batches. Each source's numbers are 0, 1, 2 … without gaps, except for numbers at other
    positions of the same 128. The weights are those of `whole_weights`.
    """
    stretch = np.asarray(positions, np.int64) // _STRETCH
    left = stretch * _STRETCH + shuffled(positions, _STRETCH, seed)
    sources, numbers = np.full_like(left, len(weights) - 1), np.empty_like(left)
    rest, here = sum(weights), np.arange(len(left))  # weight and indices of the positions not yet assigned
    for source, weight in enumerate(weights[:-1]):
        before = _count_of(left, weight, rest)
        is_source = _count_of(left + 1, weight, rest) > before
        sources[here[is_source]], numbers[here[is_source]] = source, before[is_source]
        left, here = (left - before)[~is_source], here[~is_source]
        rest -= weight
    numbers[here] = left
    return sources, numbers


def _count_of(count: np.ndarray, weight: int, rest: int) -> np.ndarray:
    """Number of the first `count` positions that go to a source with `weight` of `rest`, rounded to the nearest."""
    rounds, more = np.divmod(count, rest)
    return rounds * weight + (more * weight + rest // 2) // rest


def random_bits(numbers: np.ndarray, count: int, seed: int) -> np.ndarray:
    """`[n, count]` random uint64; row i is a function of `seed` and `numbers[i]` alone (splitmix64 streams)."""
    key = _mixed(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))
    start = _mixed(key + numbers.astype(np.uint64) * _GOLDEN)
    return _mixed(start[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 on uint64, in place (overflow is intended)."""
    shifted = x >> np.uint64(30)
    x ^= shifted
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= np.right_shift(x, np.uint64(27), out=shifted)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= np.right_shift(x, np.uint64(31), out=shifted)
    return x


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
