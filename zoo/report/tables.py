"""The tables of a report: what was trained, how configs differ, what evaluations and sweeps found."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zoo.evaluation.results import by_axis, is_fraction, mean, spaced
from zoo.report.checks import Plain
from zoo.report.folders import Run
from zoo.train.metrics_file import is_number

ABSENT = "–"
TRAINED = {  # of results.json: heading → the number's name
    "mixers": "mixers",
    "status": "status",
    "loss": "val_loss",  # first, so that it is visible on a narrow screen
    "perplexity": "val_perplexity",
    "accuracy": "val_accuracy",
    "bigram loss": "bigram_loss",
    "parameters": "parameters",
    "without embeddings": "parameters_without_embeddings",
    "state": "state_size",
    "FLOPs per token": "training_flops_per_token",
    "tokens": "tokens_seen",
    "tokens/s": "tokens_per_second",
    "minutes": "wall_seconds",
    "device": "device",
}
SWEPT = ("parameters", "state_size", "val_loss", "val_perplexity", "val_accuracy", "tokens_per_second")
IGNORED = ("data.num_workers", "trainer.default_root_dir", "trainer.logger")  # change nothing that is learned
UNAXED = {"metric", "value", "low", "high", "count", "subtask", "position", "depth", "model", "stderr"}


class Cell(NamedTuple):
    """A cell: what is shown, and what the table is sorted by."""

    text: str
    value: float | str


class Table(NamedTuple):
    """A table that can be sorted by each of its columns."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]


def cell(value: Any, metric: str = "") -> Cell:
    """A value, in as many digits as a reader wants."""
    if value is None or value == "":
        return Cell(ABSENT, "")
    if not is_number(value):
        text = value if isinstance(value, str) else json.dumps(value)
        return Cell(text, text)
    if is_fraction(metric):
        return Cell(f"{100 * value:.1f} %", value)
    for size, unit in ((1e15, ""), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= size:
            return Cell(f"{value:.2e}" if size == 1e15 else f"{value / (size if size > 1e4 else 1e3):.4g}{unit}", value)
    return Cell(f"{value:,}" if isinstance(value, int) else f"{value:.4g}", value)


def trained(runs: Sequence[Run]) -> Table:
    """Table of the training runs: a row for each, without the columns that none has."""
    columns = [heading for heading, name in TRAINED.items() if any(run.row.get(name) is not None for run in runs)]
    rows = []
    for run in runs:
        row = dict(run.row)
        if row.get("wall_seconds") is not None:
            row["wall_seconds"] = round(row["wall_seconds"] / 60, 1)
        if isinstance(row.get("mixers"), str):
            row["mixers"] = row["mixers"].replace("+", " + ")  # where a line may break
        rows.append([cell(run.name), *(cell(row.get(TRAINED[heading]), heading) for heading in columns)])
    return Table("What was trained", ["run", *columns], rows)


def differences(runs: Sequence[Run]) -> Table:
    """The keys of the configs that are not the same in all runs: a row for each key, a column for each run.

    Of what only some runs have, as other components have other arguments, only the components are listed.
    """
    compared = [run for run in runs if run.config]
    keys = dict.fromkeys(key for run in compared for key in run.config if not key.startswith(IGNORED))
    rows = []
    for key in keys:
        values = [run.config.get(key, ABSENT) for run in compared]
        everywhere = all(key in run.config for run in compared)
        if any(value != values[0] for value in values) and (everywhere or any(map(_is_class, values))):
            rows.append([Cell(key, key), *(_setting(value) for value in values)])
    return Table("How the configs differ", ["key", *(run.name for run in compared)], rows)


def _setting(value: Any) -> Cell:
    """A value of a config, exactly; a class without its module."""
    text = value.rpartition(".")[2] if _is_class(value) else value
    if not isinstance(text, str):
        return Cell(json.dumps(text), text if isinstance(text, int | float) else json.dumps(text))
    return Cell(text, text)


def _is_class(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"(\w+\.)+[A-Z]\w*", value) is not None


def swept(folder: Path, rows: Sequence[Plain]) -> Table:
    """A sweep: a row for each run, with its place in the sweep and the main numbers."""
    names = [*(rows[0] if rows else ())]
    place = names[1 : names.index("status")] if "status" in names else names
    columns = [*place, *(name for name in ("status", "gates", *SWEPT) if name in names)]
    columns = [name for name in columns if any(row.get(name) for row in rows)]
    shown = [[cell(_number(row.get(name)), name) for name in columns] for row in rows]
    return Table(f"Sweep {folder}", [name.rpartition(".")[2].replace("_", " ") for name in columns], shown)


def _number(text: str | None) -> Any:
    """A field of a CSV as the number that it was."""
    for kind in (int, float):
        try:
            return kind(text or "")
        except ValueError:
            continue
    return text


def model_of(record: Plain) -> str:
    """The model of an evaluation's record: the name of its run."""
    path = Path(record["checkpoint"])
    return path.stem if path.suffix == ".ckpt" else path.name


def task_rows(records: Iterable[Plain]) -> dict[str, list[Plain]]:
    """The rows of an evaluation by task, each with its model."""
    tasks: dict[str, list[Plain]] = {}
    for record in records:
        rows = tasks.setdefault(record["what"]["task"], [])
        rows += [{"model": model_of(record), **row} for row in record["rows"]]
    return tasks


def axis_of(rows: Iterable[Plain]) -> str | None:
    """Return the variable that a task's results are measured over, such as the length; None for single numbers."""
    return next((name for row in rows for name, value in row.items() if name not in UNAXED and is_number(value)), None)


def measured(task: str, rows: Sequence[Plain]) -> Table:
    """A task: a row for each model and metric, a column for each value of its axis."""
    axis = axis_of(rows) or ""
    every, lines = by_axis([row if is_number(row.get(axis)) else {**row, axis: None} for row in rows], axis)
    values = spaced(every)
    if values != every:
        task += f" (some of {len({*every} - {None})} columns; rows.jsonl has all)"
    headings = [f"{axis} {value:g}".replace("_", " ") for value in values if value is not None]
    if None in values:
        headings.append("all" if headings else "value")
    shown = []
    for (model, metric), rows_at in lines.items():
        cells = [cell(mean(rows_at.get(value, ())), metric) for value in values]
        shown.append([cell(model), cell(metric.replace("_", " ")), *cells])
    return Table(task, ["model", "metric", *headings], shown)
