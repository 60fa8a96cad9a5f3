"""The file of an evaluation, `rows.jsonl`: one line for each measured cell, with all that repeats it.

Lines are only ever appended, so an interrupted evaluation continues where it stopped, and an output folder may collect
several evaluations.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernels import UserError
from zoo.evaluation.task import Row
from zoo.files.links import held_lock, open_in_place
from zoo.files.output import make_folder
from zoo.train.results import is_number

FILE, LOCK = "rows.jsonl", ".lock"
START = b'{"key": "'  # of each line
ADVICE = "remove it and the pictures in its folder, or choose another output"


class Records:
    """The measured cells in an output folder.

    Args:
        folder: The folder, which this process has `locked`: the end of a line that is being written is cut off.

    Raises:
        UserError: A line of its file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / FILE
        open_in_place(self.file, "ab").close()
        self._rows = {record["key"]: record["rows"] for record in self._read()}

    def find(self, what: dict[str, Any]) -> list[Row] | None:
        """The rows of what was measured before; None if it was not."""
        return self._rows.get(key_of(what))

    def add(self, what: dict[str, Any], rows: list[Row], about: dict[str, Any]) -> None:
        """Append the rows of a cell.

        Args:
            what: What determines the rows: the model, the task, the cell, the options.
            rows: The rows.
            about: What else to keep: versions, device, time.
        """
        self._rows[key_of(what)] = rows
        line = json.dumps({"key": key_of(what), "what": what, "rows": rows, **about}) + "\n"
        with open_in_place(self.file, "ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> Iterator[dict[str, Any]]:
        content = self.file.read_bytes()
        lines = content.split(b"\n")
        rest = lines.pop()  # half of a line, if a process was killed while it wrote
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                if not isinstance(record, dict) or not {"key", "what", "rows"} <= record.keys():
                    raise ValueError("it is not an object with key, what and rows")
                if record["key"] != key_of(record["what"]) or not isinstance(record["rows"], list):
                    raise ValueError("its key does not belong to its content")
                for row in record["rows"]:
                    _check_row(row)
            except (ValueError, RecursionError) as error:
                raise UserError(f"output: line {number} of {self.file} is damaged ({error}); {ADVICE}") from None
            yield record
        if rest[: len(START)] != START[: len(rest)]:
            raise UserError(f"output: line {len(lines) + 1} of {self.file} is not a record of an evaluation; {ADVICE}")
        if rest:
            with open_in_place(self.file, "r+b") as file:
                file.truncate(len(content) - len(rest))


def _check_row(row: Any) -> None:
    """Raise a ValueError unless a row that was read has the types of a `Row`, as tables and pictures use them."""
    if not isinstance(row, dict) or "value" not in row or not isinstance(row.get("metric"), str):
        raise ValueError("a row has a metric and a value")
    for name, value in row.items():
        plain = value is None or is_number(value) or (isinstance(value, float) and name == "value")
        if name in ("length", "pairs", "depth", "position", "count"):
            fine = is_number(value) and value >= 0
        elif name in ("value", "low", "high", "stderr"):
            fine = plain
        else:
            fine = plain or isinstance(value, str | bool)
        if not fine:
            raise ValueError(f"{name} of a row is of the wrong type")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create a folder, and keep other processes from evaluating into it.

    Raises:
        UserError: Another process does so, or the folder cannot be written to.
    """
    make_folder(folder, "output")
    busy = f"output: another process is evaluating into {folder}; wait for it, or choose another"
    with held_lock(folder / LOCK, busy):
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


def key_of(what: dict[str, Any]) -> str:
    """A hash of plain values."""
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=12).hexdigest()
