"""How many pairs are recalled: where the accuracy falls below a level."""

import math

import pytest

from zoo.experiments.definition import pairs_at, with_capacity

MEASURED = {4: 1.0, 16: 0.999, 32: 0.9698, 64: 0.735, 128: 0.3122}


def test_between_two_numbers_of_pairs_it_is_linear_in_their_logarithm():
    assert pairs_at({4: 1.0, 16: 0.0}, 0.5) == pytest.approx(8)
    assert pairs_at({16: 0.8, 64: 0.4}, 0.7) == pytest.approx(16 * 4**0.25)
    assert pairs_at(MEASURED, 0.9) == pytest.approx(32 * 2 ** ((0.9698 - 0.9) / (0.9698 - 0.735)))
    assert 64 < pairs_at(MEASURED, 0.5) < 128


def test_at_a_level_that_is_met_exactly_it_is_that_number():
    assert pairs_at({4: 1.0, 8: 0.9, 16: 0.5}, 0.9) == pytest.approx(8)


def test_the_order_of_the_tasks_does_not_matter():
    assert pairs_at(dict(reversed(MEASURED.items())), 0.9) == pairs_at(MEASURED, 0.9)


def test_what_was_not_reached_is_not_extrapolated():
    assert pairs_at({4: 1.0, 8: 0.95}, 0.9) == math.inf
    assert pairs_at({4: 0.89, 8: 0.95}, 0.9) == 0.0


def test_the_first_crossing_counts():
    assert pairs_at({4: 1.0, 8: 0.0, 16: 1.0}, 0.5) == pytest.approx(2**2.5)


def test_a_results_row_gets_both():
    row = with_capacity({"val_accuracy_by_task": {f"pairs_{pairs}": value for pairs, value in MEASURED.items()}})
    assert row["pairs_at_90"] == pairs_at(MEASURED, 0.9) < row["pairs_at_50"]


@pytest.mark.parametrize(
    "tasks",
    [
        None,
        {"pairs_8": 0.5},
        {"length_64_pairs_8": 0.5, "length_128_pairs_8": 0.4},
        {"length_128": 0.5, "length_256": 0.4},
        {"pairs_4": None, "pairs_8": 0.4},
    ],
)
def test_rows_of_other_tasks_are_left_alone(tasks):
    row = {"val_accuracy_by_task": tasks}
    assert with_capacity(row) == row
