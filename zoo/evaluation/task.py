"""The interface of evaluation tasks: cells, such as one length at one depth, and the rows that each of them yields."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

from kernels import UserError
from mixers.arguments import check_sizes
from zoo.evaluation.loaded import LoadedModel

Cell = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """Settings that a user may choose; None is the task's default.

    Args:
        lengths: Lengths in tokens.
        samples: Samples per cell.
        depths: Places of the needle, from 0 (the beginning) to 1.
        seed: Seed of all samples.
        haystack: Text to hide needles in, or to measure the perplexity of: a path as `TextData.path`. None: the
            embedded corpus.
        data: The folder with the files of tasks that need data; `hub` lets lm-eval download them.
        held_out: Fraction of the haystack's documents to measure perplexity on, by their hashes; 1: all.

    Raises:
        UserError: A number is out of range.
    """

    lengths: tuple[int, ...] | None = None
    samples: int | None = None
    depths: tuple[float, ...] | None = None
    seed: int = 0
    haystack: str | None = None
    data: str | None = None
    held_out: float | None = None

    def __post_init__(self) -> None:
        for length in self.lengths or ():
            check_sizes({"lengths": length})
        for depth in self.depths or ():
            if not 0 <= depth <= 1:
                raise UserError(f"depths: {depth} is not between 0, the beginning, and 1, the end")
        if self.held_out is not None and not 0 < self.held_out <= 1:
            raise UserError(f"held_out: {self.held_out} is not a fraction above 0; 1 is all of the haystack")
        check_sizes({"samples": self.samples})


class Task(ABC):
    """Something that a model is measured on.

    Args:
        options: The user's choices.

    Attributes:
        name: Its name on the command line.
        measures: What it measures, in one phrase.
        needs: What it needs besides a model.
        version: Number of its definition, raised when a cell's samples or scores change; records of other versions are
            measured again.
        axis: The entry of a row that its tables have as columns and its curves as x.
    """

    name: ClassVar[str]
    measures: ClassVar[str]
    needs: ClassVar[str] = "nothing"
    version: ClassVar[int] = 1
    axis: ClassVar[str] = "length"

    def __init__(self, options: Options) -> None:
        self.options = options

    @property
    def uses(self) -> tuple[str, ...]:
        """The names of the options that it uses in addition to lengths, samples and seed; none by default."""
        return ()

    @abstractmethod
    def cells(self, subject: LoadedModel) -> list[Cell]:
        """The cells to measure, as plain values by name.

        Raises:
            UserError: The task cannot be done with this model, or its data is missing. Nothing runs before all tasks
                have answered.
        """

    @abstractmethod
    def run(self, subject: LoadedModel, cell: Cell) -> list[Row]:
        """Measure a cell.

        Returns:
            Rows with the entries of the cell, `metric` and `value`, and if it is a mean, `count` and an interval from
            `low` to `high`.
        """

    def sources(self, cell: Cell) -> dict[str, str]:
        """Hashes of the files that a cell's samples come from, by path; a cell is measured again if they change."""
        return {}

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Rows that follow from the rows of all cells of one model; none by default."""
        return []


def proportion(correct: int, count: int) -> Row:
    """The entries of a row for a proportion, with Wilson's 95 % interval."""
    low, high = interval(correct, count)
    return {"value": correct / count, "count": count, "low": low, "high": high}


def interval(correct: int, count: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a proportion: it stays within 0 and 1, and is not empty at either end."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share, slack = correct / count, z * z / count
    centre, radius = share + slack / 2, z * math.sqrt(share * (1 - share) / count + slack / (4 * count))
    return max(0.0, (centre - radius) / (1 + slack)), min(1.0, (centre + radius) / (1 + slack))
