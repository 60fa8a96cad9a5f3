"""What a task is."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from zoo.evaluation.subject import Subject


@dataclass(frozen=True)
class Options:
    """What a user may set; None is the task's default.

    Args:
        lengths: Tokens of a prompt.
        samples: Samples of each cell.
        depths: Places of the needle, 0 … 1.
        seed: Seed of the samples.
        haystack: The user's text files for haystacks, as `TextData.path`; None: the embedded corpus.
        data: A folder with the files of tasks that need data.
    """

    lengths: tuple[int, ...] | None = None
    samples: int | None = None
    depths: tuple[float, ...] | None = None
    seed: int = 0
    haystack: str | None = None
    data: str | None = None


class Task(ABC):
    """A family of measurements, one for each cell."""

    name: ClassVar[str]
    measures: ClassVar[str]
    needs: ClassVar[str] = "nothing"

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def cells(self, subject: Subject) -> list[dict[str, Any]]:
        """What is measured, one dictionary for each cell."""

    @abstractmethod
    def run(self, subject: Subject, cell: dict[str, Any]) -> list[dict[str, Any]]:
        """Measure one cell."""

    def summary(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows made of the rows of all cells."""
        return []


def interval(correct: int, count: int) -> tuple[float, float]:
    """Wilson's interval of 95 % for a proportion."""
    z = 1.959964
    share, spread = correct / count, z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(centre - half, 0.0), min(centre + half, 1.0)
