from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
import torch

from zoo.data import Corpus, Shards, Tokenizer, TrainLoader, ValidationLoader, Windows, prepare
from zoo.data.order import interleaved, shuffled, whole_weights


@pytest.fixture
def windows(text_folder: str, tokenizer: Tokenizer) -> Windows:
    return Windows(Shards(prepare(Corpus(text_folder), tokenizer, 0.2, 1), "train"), 32, "documents")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4096])
def test_each_pass_is_a_permutation(size: int):
    order = shuffled(np.arange(3 * size), size, seed=5)
    for epoch in range(3):
        assert sorted(order[epoch * size : (epoch + 1) * size]) == list(range(size))
    repeated = np.concatenate([shuffled(np.array([p]), size, seed=5) for p in range(min(3 * size, 50))])
    assert repeated.tolist() == order[:50].tolist()


def test_passes_and_seeds_differ_and_look_random():
    size = 10_000
    a, b = np.split(shuffled(np.arange(2 * size), size, seed=0), 2)
    c = shuffled(np.arange(size), size, seed=1)
    identity = np.arange(size)
    for x, y in ((a, b), (a, c), (a, identity), (a[:-1], a[1:])):
        assert (x == y).sum() < 10
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.05


def test_the_order_never_changes():
    """Checkpoints of any age are resumed by this function."""
    assert shuffled(np.arange(12), 10, seed=3).tolist() == FROZEN


FROZEN = [4, 5, 0, 1, 9, 7, 2, 3, 6, 8, 7, 8]


def test_random_state_is_left_alone(windows: Windows):
    before = torch.get_rng_state()
    list(islice(TrainLoader(windows, 8), 3))
    list(ValidationLoader(windows, 8))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("batch_size", "world_size"), [(8, 1), (8, 2), (4, 4), (12, 4)])
def test_validation_shows_each_sample_once(windows: Windows, batch_size: int, world_size: int):
    ranks = [list(ValidationLoader(windows, batch_size, r, world_size)) for r in range(world_size)]
    assert {len(batches) for batches in ranks} == {-(-len(windows) // batch_size)}
    assert all(len({batch.tokens.shape for batch in step}) == 1 for step in zip(*ranks, strict=True))
    rows = [r for b in ranks for batch in b for r in zip(*(x.reshape(-1, 32) for x in batch[:2]), strict=True)]
    real = sorted(row.tolist() for row, labels in rows if (labels != -100).any())
    assert real == sorted(windows[i].tokens.tolist() for i in range(len(windows)))


WEIGHTS = [[7, 2, 1], [1], [1, 1], [5, 1, 1, 1, 1], [1, 1000, 3300], [1, (1 << 30) - 1]]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_sources_come_by_their_weight_and_each_in_its_own_order(weights: list[int]):
    number = 128 * 200
    sources, numbers = interleaved(np.arange(number), weights, seed=3)
    for source, weight in enumerate(weights):
        own = sources == source
        assert sorted(numbers[own]) == list(range(own.sum()))  # none twice, none left out
        expected = weight / sum(weights) * np.arange(128, number + 1, 128)
        assert np.abs(np.cumsum(own)[127::128] - expected).max() < 2
        assert (np.diff(numbers[own]) > -128).all()


def test_any_position_is_found_alone_and_far_away():
    sources, numbers = interleaved(np.arange(700), [7, 2, 1], seed=0)
    alone = [interleaved(np.array([position]), [7, 2, 1], seed=0) for position in range(700)]
    assert [(int(s[0]), int(n[0])) for s, n in alone] == list(zip(sources.tolist(), numbers.tolist(), strict=True))
    for weights in WEIGHTS:
        far = np.arange(10**15, 10**15 + 1280)
        first = far[0] // 128 * 128
        sources, numbers = interleaved(np.arange(first, first + 1280), weights, seed=0)
        assert np.abs(np.bincount(sources, minlength=len(weights)) - 1280 * np.array(weights) / sum(weights)).max() < 4
        assert (interleaved(far, weights, seed=0)[1] >= 0).all()
        exact = [int(Fraction(weight * int(first), sum(weights))) for weight in weights]
        for source, start in enumerate(exact):
            assert (np.abs(numbers[sources == source] - start) < 1290).all()


def test_neighbours_are_not_always_of_the_same_sources():
    """Else one rank of two would see but one of two sources."""
    sources, _ = interleaved(np.arange(1280), [1, 1], seed=0)
    assert 250 < (sources[::2] != sources[1::2]).sum() < 390
    assert 250 < sources[::2].sum() < 390


def test_the_interleaved_order_never_changes():
    """Else a run could not be resumed by a later version."""
    sources, numbers = interleaved(np.arange(200, 212), [7, 2, 1], seed=0)
    assert list(zip(sources.tolist(), numbers.tolist(), strict=True)) == FROZEN_MIXTURE


FROZEN_MIXTURE = [
    (1, 36),
    (2, 19),
    (1, 27),
    (0, 135),
    (0, 152),
    (0, 167),
    (1, 44),
    (1, 28),
    (0, 154),
    (0, 145),
    (2, 16),
    (0, 139),
]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([0.7, 0.2, 0.1], [7, 2, 1]),
        ([4, 2.0], [2, 1]),
        ([3e20], [1]),
        ([0.125, 1e3], [1, 8000]),
        ([1e-12, 1], [1, 1 << 30]),
        ([1, 2**0.5], [444758426, 628983398]),
    ],
)
def test_weights_are_whole_numbers(weights: list[float], whole: list[int]):
    assert whole_weights(weights) == whole
    assert all(type(weight) is int for weight in whole_weights(weights))
