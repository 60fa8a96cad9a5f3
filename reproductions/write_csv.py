"""Write what was measured as a CSV: a line for each row of a `bench.json`, each proof, fault, or run.

    python reproductions/write_csv.py runs/bench-kernels/bench.json kernels.csv
    python reproductions/write_csv.py proofs.json reproductions/measured/proofs_cpu.csv
    python reproductions/write_csv.py found.json reproductions/measured/broken_kernels_h100.csv
    python reproductions/write_csv.py runs/miniature reproductions/measured/miniature.csv

Keys of nested values become dotted columns, lists are separated by spaces, and null is an empty field. The table of a
folder of runs is one that `scaling fit` reads.
"""

import argparse
import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kernels import UserError
from zoo.files.atomic import atomic_write
from zoo.train.metrics_file import read_metrics
from zoo.train.results import read_row


def flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """A value as dotted columns."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}".strip("."))
    else:
        yield key, " ".join(map(str, value)) if isinstance(value, list) else value


def broken(record: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The faults that `dev/broken_kernels.py` made, and the checks that found each."""
    for row in record:
        found = ", ".join(dict.fromkeys(row["found"])) or "nothing"
        yield {"fault": row.get("why", "none"), "call": row["only"], "found by": found}


def benchmark(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `bench.json`, each with the device, versions and settings of all."""
    record = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(record, list):
        yield from broken(record)
        return
    if "rows" not in record:
        yield from proofs(record)
        return
    about = {key: value for key, value in record.items() if key not in ("rows", "references", "paper")}
    for row in record["rows"]:
        yield dict(flat(about | row, ""))


def proofs(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The findings of `reproductions/proofs`, without their numbers."""
    for group, findings in record.items():
        if group.startswith("proofs of "):
            for finding in findings:
                subject, _, dtype = finding["subject"].rpartition(", ")
                yield {"kind": group.removeprefix("proofs of "), "subject": subject, "dtype": dtype} | {
                    key: finding[key] for key in ("check", "status", "says")
                }


def training_curve(run: Path, row: dict[str, Any]) -> dict[str, list[float]]:
    """The training losses of a run between warm-up and decay, and the tokens before each of them."""
    metrics = [m for m in read_metrics(run / "metrics.jsonl") if "train_loss" in m]
    inside = [m for m in metrics if row["warmup_steps"] <= m["step"] < row["decay_starts"]]
    return {"tokens": [m["tokens"] for m in inside], "train_loss": [m["train_loss"] for m in inside]}


def runs(folder: Path) -> Iterator[dict[str, Any]]:
    """The results of runs, with their training losses between warm-up and decay, and their validation losses."""
    for run in sorted(path.parent for path in folder.glob("*/results.json")):
        row = read_row(run)
        assert row is not None
        validated = [m for m in read_metrics(run / "metrics.jsonl") if "val_loss" in m]
        curves = training_curve(run, row)
        curves |= {"val_tokens": [m["tokens"] for m in validated], "val_losses": [m["val_loss"] for m in validated]}
        numbers = {key: value for key, value in row.items() if key not in ("run", "blake2b")}
        yield {"name": run.name, **dict(flat(numbers | curves, ""))}


def write(rows: Iterable[dict[str, Any]], file: Path, columns: Sequence[str] | None = None) -> None:
    """Write rows as a CSV with these columns, by default those of all rows; the file is complete or not there."""
    rows = list(rows)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns or [*dict.fromkeys(key for row in rows for key in row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with atomic_write(file) as stream:
        stream.write(text.getvalue().encode())


def read(file: Path, columns: Iterable[str] = ()) -> list[dict[str, str]]:
    """Return the rows of a CSV; none if the file does not exist. A UserError if it lacks one of these columns."""
    if not file.exists():
        return []
    with file.open(encoding="utf-8", errors="replace", newline="") as stream:
        reader = csv.DictReader(stream)
        if missing := {*columns}.difference(reader.fieldnames or ()):
            raise UserError(f"file: {file} is a table without the columns {', '.join(sorted(missing))}")
        return [*reader]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("table", type=Path)
    arguments = parser.parse_args()
    write((runs if arguments.source.is_dir() else benchmark)(arguments.source), arguments.table)
