"""Write the generated tables of README and `docs/` again: `python docs/tables.py`.

Such a table stands between two comments. The first names a CSV file and a query over its lines, `rows`, in SQL:

    <!-- table: reproductions/measured/state_h200.csv
    select mixer, printf('%.2f', median(val_accuracy)) as accuracy from rows group by mixer -->

    <!-- /table -->

Next to SQLite's functions there are `median`, an aggregate; `word(text, n)`, which returns number n, from 0, of several
that spaces separate; and `pairs_at(level, pairs, accuracy, …)`, the pairs recalled with an accuracy of `level`.
"""

import csv
import re
import sqlite3
import statistics
from collections.abc import Sequence
from pathlib import Path

from zoo.experiments.definition import pairs_at

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = re.compile(r"(<!-- table: (\S+)\n(.*?)-->\n)(.*?)(<!-- /table -->)", re.DOTALL)


class Median:
    """The aggregate `median` of SQL."""

    def __init__(self) -> None:
        self.values = list[float]()

    def step(self, value: float | None) -> None:
        """Add a value; null is left out."""
        if value is not None:
            self.values.append(value)

    def finalize(self) -> float | None:
        """Return the median; null if there is no value."""
        return statistics.median(self.values) if self.values else None


def _value(text: str) -> str | int | float | None:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text or None


def _pairs(level: float, pairs: str, *accuracies: float) -> float:
    return pairs_at(dict(zip(map(int, pairs.split()), accuracies, strict=True)), level)


def query(file: Path, sql: str) -> tuple[list[str], list[Sequence[object]]]:
    """Return the column names and the lines of a query over a CSV file."""
    with file.open(encoding="utf-8", newline="") as stream:
        header, *lines = csv.reader(stream)
    base = sqlite3.connect(":memory:")
    base.create_aggregate("median", 1, Median)  # type: ignore[arg-type]  # typeshed wants an int of `finalize`
    base.create_function("word", 2, lambda text, n: None if text is None else float(str(text).split()[n]))
    base.create_function("pairs_at", -1, _pairs)
    names = ", ".join(f'"{name}"' for name in header)
    base.execute(f"create table rows ({names})")
    base.executemany(
        f"insert into rows values ({', '.join('?' * len(header))})", [[_value(text) for text in line] for line in lines]
    )
    answer = base.execute(sql)
    return [column[0] for column in answer.description], answer.fetchall()


def render(file: Path, sql: str) -> str:
    """Return a query over a CSV file as a table in Markdown."""
    columns, lines = query(file, sql)
    cells = [
        columns,
        ["---"] * len(columns),
        *(["–" if cell is None else str(cell) for cell in line] for line in lines),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def rewrite(text: str) -> str:
    """Return a page with all of its generated tables written again."""
    return TABLE.sub(lambda m: f"{m[1]}\n{render(ROOT / m[2], m[3])}\n{m[5]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewrite(page.read_text(encoding="utf-8")), encoding="utf-8")
