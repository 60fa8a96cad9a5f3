"""The marker `pairwise`: of a test's grid of parameters, every run takes rows that have each pair of values together.

The other rows are `nightly`. So a fault that shows at one value, or at two together, shows in every run.
"""

import itertools
from collections.abc import Iterable

import pytest

Row = tuple[int, ...]


def covering(rows: Iterable[Row]) -> set[Row]:
    """Rows that have every pair of entries that occurs in `rows`; greedy: each adds the most pairs that are missing."""
    pairs = {row: {*itertools.combinations(enumerate(row), min(2, len(row)))} for row in rows}
    missing = {pair for each in pairs.values() for pair in each}
    chosen: set[Row] = set()
    while missing:
        best = max(pairs, key=lambda row: len(pairs[row] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen


def mark_the_rest(items: Iterable[pytest.Item]) -> None:
    """Mark the rows as nightly that tests marked `pairwise` do not need."""
    grids: dict[str, dict[Row, pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairwise") and hasattr(item, "callspec"):
            name = item.nodeid.partition("[")[0]
            # a value is the same object in all rows, and need not be hashable
            grids.setdefault(name, {})[tuple(map(id, item.callspec.params.values()))] = item
    for grid in grids.values():
        for row in grid.keys() - covering(grid):
            grid[row].add_marker(pytest.mark.nightly)
