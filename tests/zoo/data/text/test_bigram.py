import math
from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest

from kernels.errors import UserError
from zoo.data import interpolated_bigram_loss


def by_hand(train: list[int], validation: list[int], size: int) -> float:
    """The best of the three models over a grid of their parameters, one probability at a time."""
    pairs, ones = Counter(pairwise(train)), Counter(train)
    context, followers = Counter(train[:-1]), Counter(v for v, _ in pairs)

    def probability(model: str, v: int, w: int, mu: float, x: float, d: float) -> float:
        q, k = mu * ones[w] / len(train) + (1 - mu) / size, x / (1 - x)
        if context[v] == 0:
            return q
        if model == "constant":
            return x * pairs[v, w] / context[v] + (1 - x) * q
        if model == "Witten-Bell":
            return (pairs[v, w] + k * followers[v] * q) / (context[v] + k * followers[v])
        return (max(pairs[v, w] - d, 0) + (10 * k + d * followers[v]) * q) / (context[v] + 10 * k)

    best, grid = math.inf, np.linspace(0.02, 0.98, 13)
    for model in ("constant", "Witten-Bell", "discounted"):
        for mu, x, d in product(grid, grid, grid if model == "discounted" else [0]):
            assert abs(sum(probability(model, train[0], w, mu, x, d) for w in range(size)) - 1) < 1e-9
            losses = [-math.log(probability(model, v, w, mu, x, d)) for v, w in pairwise(validation)]
            best = min(best, sum(losses) / len(losses))
    return best


def test_against_a_grid_by_hand():
    generator = np.random.default_rng(0)
    train = generator.choice(5, 60, p=[0.4, 0.3, 0.2, 0.1, 0]).tolist()
    validation = [*train[10:30], 4, *generator.integers(0, 5, 20).tolist()]
    fast, slow = interpolated_bigram_loss(np.array(train), np.array(validation), 5), by_hand(train, validation, 5)
    assert fast <= slow + 1e-9
    assert fast > slow - 0.02


def test_limits():
    ring = np.arange(4000) % 8
    assert interpolated_bigram_loss(ring, ring, 8) < 1e-3
    noise = np.random.default_rng(0).integers(0, 32, 200_000)
    assert abs(interpolated_bigram_loss(noise[:-50_000], noise[-50_000:], 32) - math.log(32)) < 0.01


def test_large_vocabulary_is_light():
    tokens = np.random.default_rng(0).zipf(1.3, 300_000).clip(max=32_000) - 1
    assert 0 < interpolated_bigram_loss(tokens[:-10_000], tokens[-10_000:].astype(np.uint16), 32_000) < math.log(32_000)


def test_errors():
    with pytest.raises(UserError, match=r"validation_tokens has the shape \(1,\)"):
        interpolated_bigram_loss(np.arange(4), np.arange(1), 4)
    with pytest.raises(UserError, match="train_tokens has values from 0 to 4; vocab_size is 4"):
        interpolated_bigram_loss(np.arange(5), np.arange(4), 4)
