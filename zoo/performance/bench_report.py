"""The report of a benchmark: a table for the terminal, and bench.json."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from kernels import UserError
from zoo.display import new_console, new_table
from zoo.files.atomic import atomic_write
from zoo.files.output import check_record

PATH = "path: the implementations that ran, triton, torch or reference"

FILE = "bench.json"


@dataclass
class Report:
    """The rows of one benchmark; each benchmark has a subclass with its table.

    Args:
        folder: The folder to write to.
        about: Device, versions and settings.
        rows: One row per measurement.

    Raises:
        UserError: The folder is a file, or has a bench.json that no benchmark wrote.
    """

    benchmark: ClassVar[str]  # kernels, training and so on

    folder: Path
    about: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:  # before anything is measured
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"folder: {self.folder} is a file")
        if (file := self.folder / FILE).exists():
            check_record(file, ("kind", "device", "rows"), "folder", "a benchmark")

    @property
    def failed(self) -> bool:
        """Return whether a result was wrong."""
        return any(map(is_wrong, self.rows))

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and write bench.json, so that a benchmark that is interrupted keeps its rows."""
        self.rows.append(row)
        Report.write(self)  # without what subclasses draw of all rows

    def write(self) -> None:
        """Write bench.json."""
        record = {"kind": self.benchmark, **self.about, "rows": self.rows}
        with atomic_write(self.folder / FILE) as file:
            file.write(json.dumps(record, indent=1, allow_nan=False).encode())

    def table(self) -> Table:
        """The table for the terminal."""
        raise NotImplementedError

    def new_table(self, columns: Iterable[str]) -> Table:
        """An empty table with device, versions and precision above it."""
        about = self.about
        triton = f", triton {about['triton']}" if about["triton"] else ""
        title = f"{about['device']}, torch {about['torch']}{triton}, {about.get('dtype') or about['precision']}"
        return new_table(columns, title=title, collapse_padding=True, pad_edge=False)  # 100 columns hold the widest


def captioned(table: Table, remarks: Iterable[str]) -> Table:
    """The table with remarks below it, each once."""
    table.caption = "\n".join(dict.fromkeys(remarks)) or None
    return table


def without(table: Table, remarks: list[str], head: list[str], row: dict[str, Any]) -> None:
    """Add a row without a result, and a remark with the reason."""
    failed = is_wrong(row)
    table.add_row(*head, "WRONG" if failed else "–", style="red" if failed else None)
    remarks.append(f"{' '.join(part for part in head if part).strip()}: {row['note']}")


def path_of(row: dict[str, Any], remarks: list[str]) -> str:
    """The implementations of all ops of a model, with remarks on ops that have another, and on steps not captured."""
    if row.get("not_captured") is not None:
        remarks.append(f"{row['model']} runs eagerly: {row['not_captured']}")
    ops: dict[str, list[str]] = {}
    for op, names in row.get("implementations", {}).items():
        ops.setdefault(" + ".join(names), []).append(op)
    most, *others = sorted(ops, key=lambda names: -len(ops[names])) or [""]
    remarks += [f"{row['model']}: {names}: {', '.join(ops[names])}" for names in others]
    return " + ".join([most, *others])


def is_wrong(row: dict[str, Any]) -> bool:
    """Return whether the result of a row was wrong."""
    return "gate" in row and not row["gate"]["passed"]


def formatted(value: float | None, form: str) -> str:
    """A number in a format; nothing for None."""
    return "" if value is None else form.format(value)


def pair(first: float | None, second: float | None, form: str) -> str:
    """Two numbers in a format; nothing if one is None."""
    return "" if first is None or second is None else f"{form.format(first)} / {form.format(second)}"


def complaint(error: Exception) -> str:
    """An exception of another library, as a remark."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def show(report: Report) -> Report:
    """Write a report, and print its table."""
    report.write()
    console = new_console(width=160)
    console.print(report.table())
    console.out(f"written to {report.folder}", highlight=False)
    return report
