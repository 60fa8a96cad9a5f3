"""The numbers that we measured, read from the file that a command wrote: no row repeats them by hand."""

import csv
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels import UserError
from mixers import did_you_mean


@dataclass(frozen=True)
class Measured:
    """Numbers of a file that a row shows, for each combination of values: the median and all seeds.

    Args:
        file: A CSV file of this repository with a line for each run or evaluation, such as the `sweep.csv` of a sweep,
            or the `bench.json` of a benchmark, which has no seeds.
        by: The columns that tell the combinations apart.
        metric: The column of the numbers.
        where: The lines to read, by the values of columns; null: all.
        across: Another such column, whose values become the columns of the table, which then has medians alone.
    """

    file: str
    by: list[str]
    metric: str
    where: dict[str, str] | None = None
    across: str | None = None

    def numbers(self, root: Path) -> dict[tuple[str, ...], list[float]]:
        """The numbers of each combination, in the order of the seeds; none where a benchmark has no result.

        Args:
            root: The folder of the repository.

        Raises:
            UserError: The file or a column is missing, no line is to be read, or a seed is there twice.
        """
        chosen, lines = self.where or {}, self._lines(root)
        columns = [*self.by, *([self.across] if self.across else [])]
        seeded = not self.file.endswith(".json")
        # of all lines, since a benchmark's lines differ if one has no result
        header = dict.fromkeys(key for line in lines for key in line)
        for column in (*columns, self.metric, *chosen, *(["seed"] if seeded else [])):
            if lines and column not in header:
                raise UserError(f"ours.measured: {self.file} has no column {column!r}{did_you_mean(column, header)}")
        by_labels: dict[tuple[str, ...], dict[int, float]] = {}
        for line in lines:
            if all(str(line[column]) == value for column, value in chosen.items()):
                values = by_labels.setdefault(tuple(str(line[column]) for column in columns), {})
                seed = int(line["seed"]) if seeded else len(values)
                if seed in values:
                    raise UserError(f"ours.measured: {self.file} has seed {seed} twice; `where` can choose")
                if line.get(self.metric) is not None:
                    values[seed] = float(line[self.metric])
        if not by_labels:
            raise UserError(f"ours.measured.where: no line of {self.file} is chosen")
        return {labels: [values[seed] for seed in sorted(values)] for labels, values in by_labels.items()}

    def table(self, root: Path) -> Iterator[str]:
        """Return the numbers as a table in Markdown, line by line."""
        numbers = self.numbers(root)
        only = "".join(f", {_short(column)} {value}" for column, value in (self.where or {}).items() if value)
        by, metric = list(map(_short, self.by)), f"{_short(self.metric)}{only}"
        if self.across is None:
            yield _row([*by, f"{metric}: median", "all seeds"])
            yield _row(["---"] * (len(by) + 2), "")
            for labels, values in numbers.items():
                yield _row([*labels, _middle(values), " ".join(map(_figure, values))])
            return
        yield from (f"{metric[0].upper()}{metric[1:]}:", "")
        across = list(dict.fromkeys(labels[-1] for labels in numbers))
        yield _row([*by, *(f"{_short(self.across)} {value}" for value in across)])
        yield _row(["---"] * (len(by) + len(across)), "")
        for labels in dict.fromkeys(labels[:-1] for labels in numbers):
            yield _row([*labels, *(_middle(numbers.get((*labels, value), [])) for value in across)])

    def _lines(self, root: Path) -> list[dict[str, Any]]:
        """The lines of the file."""
        path = root / self.file
        if not path.is_file():
            raise UserError(f"ours.measured.file: there is no {self.file}")
        with path.open(encoding="utf-8", newline="") as stream:
            return json.load(stream)["rows"] if path.suffix == ".json" else list(csv.DictReader(stream))


def _row(cells: list[str], around: str = " ") -> str:
    """A line of a table in Markdown."""
    return "|" + "".join(f"{around}{cell}{around}|" for cell in cells)


def _middle(values: list[float]) -> str:
    """The median; a dash if there are none."""
    return _figure(statistics.median(values)) if values else "–"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"


def _short(column: str) -> str:
    return column.rpartition(".")[2].replace("_", " ")
