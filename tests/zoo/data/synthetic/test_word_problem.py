"""The groups of word problems."""

import numpy as np
import pytest

from kernels import UserError
from zoo.data import TokenTasks, WordProblem
from zoo.data.synthetic.word_problem import Group, elements, multiplication

SIZES: dict[Group, int] = {"parity": 2, "S3": 6, "A5": 60}


@pytest.mark.parametrize("group", SIZES)
def test_the_tables_are_groups(group: Group):
    table, size = multiplication(group), SIZES[group]
    assert table.shape == (size, size)
    assert (table[0] == np.arange(size)).all()  # element 0 changes nothing
    assert (table[:, 0] == np.arange(size)).all()
    for rows in (table, table.T):  # every equation has one solution
        assert (np.sort(rows, axis=1) == np.arange(size)).all()
    a, b, c = np.ogrid[:size, :size, :size]
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()


def test_which_groups_they_are():
    assert (multiplication("parity") == [[0, 1], [1, 0]]).all()
    for group, orders in {"S3": {1: 1, 2: 3, 3: 2}, "A5": {1: 1, 2: 15, 3: 20, 5: 24}}.items():
        table, actual = multiplication(group), []
        for element in range(len(table)):
            power, order = element, 1
            while power:
                power, order = table[element, power], order + 1
            actual.append(order)
        assert {order: actual.count(order) for order in set(actual)} == orders
        assert not (table == table.T).all()
    assert elements("S3")[:3] == ((0, 1, 2), (0, 2, 1), (1, 0, 2))


def test_a_product_applies_the_later_element_last():
    exchange_last, exchange_first = elements("S3").index((0, 2, 1)), elements("S3").index((1, 0, 2))
    both = elements("S3")[multiplication("S3")[exchange_last, exchange_first]]
    # item 0 goes to place 1 first, and from there to place 2
    assert both[0] == 2


@pytest.mark.parametrize("group", SIZES)
def test_all_elements_are_drawn(group: Group):
    task = WordProblem(group, length=512)
    batch = TokenTasks([task], SIZES[group]).samples(task, 20, "train").batch(range(20))
    assert set(batch.tokens.flatten().tolist()) == set(batch.labels.flatten().tolist()) == set(range(SIZES[group]))


def test_what_is_impossible():
    with pytest.raises(UserError, match=r"^group: 'S4' is not one of parity, S3, A5$"):
        WordProblem("S4")
    with pytest.raises(UserError, match=r"^data\.vocab_size is 59; data\.tasks\[0\] needs at least 60 for A5\.$"):
        TokenTasks([WordProblem("A5")], 59)
