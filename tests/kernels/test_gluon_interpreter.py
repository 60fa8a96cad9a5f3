"""Groups of warps in the interpreter of Gluon take turns and never hang."""

import pytest
import torch

from .gluon_interpreter import Barriers, Shared, allocate


def barrier(barriers: Barriers) -> Shared:
    """A barrier that waits for one arrival."""
    bar = allocate(torch.int64, [1], None)
    barriers.init(bar, 1)
    return bar


def test_groups_hand_over_in_the_order_of_their_barriers():
    barriers, order = Barriers(), list[str]()
    full, empty = barrier(barriers), barrier(barriers)

    def write() -> None:
        for i in range(4):
            barriers.wait(empty, (i & 1) ^ 1)
            order.append(f"write {i}")
            barriers.arrive(full)

    def read() -> None:
        for i in range(4):
            barriers.wait(full, i & 1)
            order.append(f"read {i}")
            barriers.arrive(empty)

    barriers.specialised([(read, ()), (write, ())], None, None)
    assert order == [f"{verb} {i}" for i in range(4) for verb in ("write", "read")]


def test_groups_that_wait_for_each_other_are_an_error():
    barriers = Barriers()
    a, b = barrier(barriers), barrier(barriers)
    with pytest.raises(AssertionError, match="nobody arrives"):
        barriers.specialised([(barriers.wait, (a, 0)), (barriers.wait, (b, 0))], None, None)


def test_a_group_that_ends_without_arriving_is_an_error():
    barriers = Barriers()
    with pytest.raises(AssertionError, match="the last group ends while the others wait"):
        barriers.specialised([(barriers.wait, (barrier(barriers), 0)), (lambda: None, ())], None, None)


def test_the_error_of_a_group_is_raised_although_another_one_waits_for_it():
    barriers = Barriers()

    def fail() -> None:
        raise IndexError("outside")

    with pytest.raises(IndexError, match="outside"):
        barriers.specialised([(barriers.wait, (barrier(barriers), 0)), (fail, ())], None, None)
