"""The numbers that we measured, read from the file that a command wrote: no row repeats them by hand."""

import csv
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernels import UserError
from mixers import did_you_mean


@dataclass(frozen=True)
class Measured:
    """Which numbers of a file a row shows: the median and all seeds of each combination of values.

    Args:
        file: A CSV file of this repository with a line for each run or evaluation, such as the `sweep.csv` of a sweep.
        by: The columns that tell the combinations apart.
        metric: The column of the numbers.
        where: The lines to read, by the values of columns; null: all.
    """

    file: str
    by: list[str]
    metric: str
    where: dict[str, str] | None = None

    def seeds(self, root: Path) -> dict[tuple[str, ...], list[float]]:
        """The numbers of each combination, in the order of the seeds.

        Args:
            root: The folder of the repository.

        Raises:
            UserError: The file or a column is missing, no line is to be read, or a line is there twice.
        """
        path, chosen = root / self.file, self.where or {}
        if not path.is_file():
            raise UserError(f"ours.measured.file: there is no {self.file}")
        with path.open(encoding="utf-8", newline="") as stream:
            lines = list(csv.DictReader(stream))
        for column in (*self.by, self.metric, *chosen, "seed"):
            if lines and column not in lines[0]:
                raise UserError(f"ours.measured: {self.file} has no column {column!r}{did_you_mean(column, lines[0])}")
        found: dict[tuple[str, ...], dict[int, float]] = {}
        for line in lines:
            if all(line[column] == value for column, value in chosen.items()):
                values = found.setdefault(tuple(line[column] for column in self.by), {})
                if int(line["seed"]) in values:
                    raise UserError(f"ours.measured: {self.file} has seed {line['seed']} twice; `where` can choose")
                values[int(line["seed"])] = float(line[self.metric])
        if not found:
            raise UserError(f"ours.measured.where: no line of {self.file} is chosen")
        return {labels: [values[seed] for seed in sorted(values)] for labels, values in found.items()}

    def table(self, root: Path) -> Iterator[str]:
        """The same as a table in Markdown, line by line."""
        only = "".join(f", {_short(column)} {value}" for column, value in (self.where or {}).items() if value)
        yield f"| {' | '.join(map(_short, self.by))} | {_short(self.metric)}{only}: median | all seeds |"
        yield f"|{'---|' * len(self.by)}---|---|"
        for labels, values in self.seeds(root).items():
            each = " ".join(f"{value:.3f}" for value in values)
            yield f"| {' | '.join(labels)} | {statistics.median(values):.3f} | {each} |"


def _short(column: str) -> str:
    return column.rpartition(".")[2].replace("_", " ")
