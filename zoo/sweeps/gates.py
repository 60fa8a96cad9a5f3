"""Conditions without which the results of a sweep mean little: what a ceiling or every cell must reach."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels import UserError


@dataclass(frozen=True)
class Gate:
    """Numbers that runs must reach.

    Args:
        numbers: Numbers in `results.json`, such as `val_accuracy_by_task.pairs_4`.
        at_least: What each of them must be at least; null: no bound.
        at_most: What each of them may be at most; null: no bound.
        where: Axis (or `control`) → label: the cells that it is about; by default all of them.

    Raises:
        UserError: There are no numbers, or no bound.
    """

    numbers: list[str]
    at_least: float | None = None
    at_most: float | None = None
    where: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if not self.numbers:
            raise UserError("gates.numbers: the list is empty; name a number in results.json")
        if self.at_least is None and self.at_most is None:
            raise UserError(f"gates: {', '.join(self.numbers)} has no bound; give at_least or at_most")

    def concerns(self, cell: Mapping[str, str]) -> bool:
        """Return whether a cell is one that it is about."""
        return all(cell.get(axis) == label for axis, label in (self.where or {}).items())

    def failure(self, row: Mapping[str, Any]) -> str | None:
        """Describe the failure in a flat results row; None if there is none."""
        for name in self.numbers:
            value = row.get(name)
            if value is None or math.isnan(value):
                return f"{name} is missing"
            if self.at_least is not None and value < self.at_least:
                return f"{name} is {value:.3g}, below {self.at_least:g}"
            if self.at_most is not None and value > self.at_most:
                return f"{name} is {value:.3g}, above {self.at_most:g}"
        return None
