"""ListOps: the labels are right, and a sample is a function of its number."""

import numpy as np
import pytest

from reproductions.listops import WORDS, ListOps
from zoo.data import Batch

SMALL = {"min_length": 5, "max_length": 40, "max_depth": 4, "max_args": 5, "batch_size": 4}


def lists(batch: Batch) -> list[list[str]]:
    """The words of each list of a batch."""
    bounds = batch.cu_seqlens.tolist()
    return [
        [WORDS[token] for token in batch.tokens[0, start:stop].tolist()]
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]


def value_of(words: list[str]) -> int:
    """The value of a list, step by step from the innermost bracket outwards."""
    words = list(words)
    while "]" in words:
        stop = words.index("]")
        start = max(place for place in range(stop) if words[place].startswith("["))
        values = sorted(int(word) for word in words[start + 1 : stop])
        middle = len(values) // 2
        actual = {
            "[MIN": values[0],
            "[MAX": values[-1],
            "[MED": values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) // 2,
            "[SM": sum(values) % 10,
        }[words[start]]
        words[start : stop + 1] = [str(actual)]
    (result,) = words
    return int(result)


def depth_of(words: list[str]) -> int:
    """Levels, the outer list and digits included."""
    return 1 + int(max(np.cumsum([word.startswith("[") - (word == "]") for word in words])))


def arguments_of(words: list[str]) -> list[int]:
    """Number of arguments of every operator."""
    open_lists, counts = [0], []
    for word in words:
        if word == "]":
            counts.append(open_lists.pop())
        else:
            open_lists[-1] += 1
            if word.startswith("["):
                open_lists.append(0)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, SMALL], ids=["published", "small"])
def test_labels_are_the_values_of_the_lists(sizes: dict):
    data = ListOps(**sizes)
    batch = data.train.batch(range(300))
    actual = lists(batch)
    assert batch.labels[0].tolist() == [value_of(words) for words in actual]
    lengths = [len(words) for words in actual]
    assert data.min_length <= min(lengths)
    assert max(lengths) <= data.max_length == data.sequence_length
    assert max(map(depth_of, actual)) == data.max_depth
    counts = [count for words in actual for count in arguments_of(words)]
    assert (min(counts), max(counts)) == (2, data.max_args)
    assert {word for words in actual for word in words} == {*WORDS}
    assert np.bincount(batch.labels[0], minlength=10).max() < 90  # of 300: no class can be guessed


def test_samples_never_change():
    """Runs of any age are continued, and compared, by this function."""
    data = ListOps(**{**SMALL, "max_length": 9})
    assert [" ".join(words) for words in lists(data.train.batch([0, 1000]))] == FROZEN


FROZEN = ["[MIN 9 9 4 3 7 ]", "[MAX 9 4 6 ]"]


def test_a_fixed_number_of_lists_is_shuffled_in_each_pass():
    data = ListOps(**SMALL, train_samples=8)
    orders = data.train.order(np.arange(16), seed=0).reshape(2, 8)
    assert [sorted(order) for order in orders.tolist()] == [list(range(8))] * 2
    assert orders[0].tolist() != orders[1].tolist()
    assert ListOps(**SMALL, train_samples=None).train.order(np.arange(3), 0).tolist() == [0, 1, 2]


def test_every_list_is_validated_once():
    batches = list(ListOps(**SMALL, validation_samples=10).val_dataloader())
    assert sum(int((batch.labels != -100).sum()) for batch in batches) == 10
