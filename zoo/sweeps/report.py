"""The results of a sweep: a table, a CSV with one row per run, and a picture."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich import box
from rich.table import Table

from kernels import UserError
from mixers import did_you_mean
from zoo.config.build import from_config, instantiate, vocabulary
from zoo.files.atomic import atomic_write
from zoo.sweeps.plan import CONTROL, Run, Sweep
from zoo.sweeps.runner import result


class Outcome(NamedTuple):
    """A run and its results row, which is None if the run is not complete."""

    run: Run
    row: dict[str, Any] | None


class Cell(NamedTuple):
    """All seeds of one combination of values, at its best learning rate."""

    labels: dict[str, str]  # axis → label
    learning_rate: float | None
    rows: list[dict[str, Any]]
    values: list[float]  # the metric of each row

    @property
    def median(self) -> float:
        return statistics.median(self.values) if self.values else math.nan


def outcomes(runs: Sequence[Run], folder: Path) -> list[Outcome]:
    """Each run with its results row."""
    return [Outcome(run, result(folder / run.name)) for run in runs]


def cells(sweep: Sweep, results: Sequence[Outcome]) -> list[Cell]:
    """All combinations of values, in order, each at the learning rate with the best median over seeds.

    Raises:
        UserError: The results have no number named `sweep.metric`.
    """
    grouped: dict[tuple[tuple[str, str], ...], dict[float | None, list[dict[str, Any]]]] = {}
    for run, row in results:
        rows = grouped.setdefault(run.cell, {}).setdefault(run.learning_rate, [])
        if row is not None:
            rows.append(row)
    best_cells = []
    for labels, rates in grouped.items():
        alternatives = [
            Cell(dict(labels), rate, rows, [_number(row, sweep.metric, "metric") for row in rows])
            for rate, rows in rates.items()
        ]
        complete = [cell for cell in alternatives if cell.values]
        best = (min if sweep.mode == "min" else max)(complete, key=lambda cell: cell.median, default=alternatives[0])
        best_cells.append(best)
    return best_cells


def _number(row: dict[str, Any], name: str, argument: str) -> float:
    """A number in a results row; null, which stands for nan, counts as infinite."""
    row = _flat(row)
    if name not in row:
        numbers = [key for key, value in row.items() if isinstance(value, int | float)]
        raise UserError(
            f"{argument}: {name!r} is not in results.json{did_you_mean(name, numbers)} ({', '.join(numbers)})"
        )
    return math.inf if row[name] is None else float(row[name])


def table(sweep: Sweep, results: Sequence[Outcome]) -> Table:
    """A table with one row per combination of values: sizes, best learning rate, and the metric over the seeds."""
    best = "lowest" if sweep.mode == "min" else "highest"
    caption = f"{sweep.metric} (best is {best}) of {len(sweep.seeds)} seeds; ± is the standard deviation"
    if len(sweep.learning_rates) > 1:
        caption += f"; lr: the best of {', '.join(f'{rate:g}' for rate in sweep.learning_rates)} by the median"
    shown = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    columns = [*sweep.axes, *([CONTROL] if sweep.controls else [])]
    rows = cells(sweep, results)
    for column in columns:  # in narrow terminals, labels wrap between words and are never cut
        words = [word for cell in rows for word in cell.labels.get(column, "").split()]
        shown.add_column(column.split(".")[-1], min_width=max(map(len, words), default=0))
    rates = len(sweep.learning_rates) > 1
    for column in ("params", "state", *(["lr"] if rates else []), "median", "mean", "all seeds"):
        many = column == "all seeds"
        shown.add_column(column, justify="right", no_wrap=not many, min_width=5 if many else None)
    for cell in rows:
        row = cell.rows[0] if cell.rows else {}
        shown.add_row(
            *(cell.labels.get(column, "") for column in columns),
            _short(row.get("parameters")),
            _short(row.get("state_size")),
            *([f"{cell.learning_rate:g}"] if rates else []),
            f"{cell.median:.3f}" if cell.values else "",
            _mean(cell.values),
            " ".join(f"{value:.3f}" for value in sorted(cell.values)),
        )
    return shown


def _mean(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 and math.isfinite(mean) else f"{mean:.3f}"


def _short(number: Any) -> str:
    return "" if number is None else f"{EngFormatter(places=1, sep='')(number)}"


def write_csv(sweep: Sweep, results: Sequence[Outcome], file: Path) -> None:
    """Write a CSV with one row per run: its place in the sweep, then its results row."""
    columns = ["name", *sweep.axes, *([CONTROL] if sweep.controls else []), "learning_rate", "seed", "status"]
    numbers = list(dict.fromkeys(key for _, row in results if row for key, value in _flat(row).items()))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *(key for key in numbers if key not in columns)], lineterminator="\n")
    writer.writeheader()
    for run, row in results:
        place = {"name": run.name, **dict(run.cell), "learning_rate": run.learning_rate, "seed": run.seed}
        writer.writerow({"status": "missing", **(_flat(row) if row else {}), **place})
    with atomic_write(file) as out:
        out.write(text.getvalue().encode())


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A results row with lists and mappings flattened into separate columns."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list):
            flat |= {f"{key}.{number}": item for number, item in enumerate(value, start=1)}
        elif isinstance(value, dict):
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            flat[key] = value
    return flat


def figure(sweep: Sweep, results: Sequence[Outcome]) -> Figure:
    """A plot of the metric over `sweep.x`: a line through the medians per value of the other axes, a dot per seed."""
    complete = [cell for cell in cells(sweep, results) if cell.values]
    drawn = [cell for cell in complete if CONTROL not in cell.labels]
    x = sweep.x or next(iter(sweep.axes), "state_size")
    picture = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.add_subplot(xlabel=x.split(".")[-1].replace("_", " "), ylabel=sweep.metric.replace("_", " "))
    lines: dict[str, list[Cell]] = {}
    apart = [axis for axis in sweep.axes if axis != x] if sweep.lines is None else sweep.lines
    for cell in drawn:
        name = ", ".join(cell.labels[axis] for axis in apart)
        lines.setdefault(name, []).append(cell)
    names = list(dict.fromkeys(cell.labels[x] for cell in drawn)) if x in sweep.axes else []
    ordered = all(map(_is_number, names))  # also true if x is a number in the results
    for number, (name, group) in enumerate(lines.items()):
        at = [names.index(cell.labels[x]) if names else _number(cell.rows[0], x, "x") for cell in group]
        order = sorted(range(len(group)), key=lambda i: at[i])
        color = f"C{number % 10}"
        medians = [group[i].median for i in order]
        line = "-" if ordered else "none"  # names have no order
        drawing: dict[str, Any] = {"linestyle": line, "marker": "_", "markersize": 18, "markeredgewidth": 2}
        axes.plot([at[i] for i in order], medians, color=color, label=name or None, **drawing)
        for i in order:
            axes.plot([at[i]] * len(group[i].values), group[i].values, "o", color=color, alpha=0.5, markersize=4)
    for number, cell in enumerate(cell for cell in complete if CONTROL in cell.labels):
        axes.axhline(cell.median, color="gray", linestyle=("--", ":", "-.")[number % 3], label=cell.labels[CONTROL])
    if names:
        axes.set_xticks(range(len(names)), names, rotation=20 if max(map(len, names)) > 8 else 0)
    elif drawn:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if any(lines) or sweep.controls:
        picture.legend(loc="outside right center", fontsize="small")
    axes.grid(alpha=0.3)
    return picture


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True


def write(sweep: Sweep, results: Sequence[Outcome], folder: Path) -> Table:
    """Write `sweep.csv` and `sweep.png` to the folder, and return the table."""
    shown = table(sweep, results)
    write_csv(sweep, results, folder / "sweep.csv")
    with atomic_write(folder / "sweep.png") as file:
        figure(sweep, results).savefig(file, format="png")
    return shown


def preview(runs: Sequence[Run], folder: Path) -> Table:
    """A table of a sweep's runs with their sizes, computed without allocating memory, and whether they are complete."""
    shown = Table(caption=f"FLOPs are forward, per token; runs go to {folder}/NAME", caption_justify="left")
    for column in ("run", "parameters", "state", "MFLOP", ""):
        shown.add_column(
            column, justify="left" if column == "run" else "right", no_wrap=column != "run", overflow="fold"
        )
    sizes: dict[Any, tuple[str, str, str]] = {}
    for run in runs:
        if run.cell not in sizes:
            config = run.read()
            data = instantiate("data", config)
            config.model.vocab_size = vocabulary(config)
            model, length = from_config(config, device="meta"), data.sequence_length
            flops = f"{model.flops(length) / length / 1e6:.2f}"
            sizes[run.cell] = (f"{model.num_parameters():,}", f"{model.state_size(length):,}", flops)
        status = "complete" if result(folder / run.name) else ""
        shown.add_row(run.name, *sizes[run.cell], status)
    return shown
