"""The results of a sweep: a table, a CSV with one row per run, and a picture."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich.table import Table

from kernels import UserError
from mixers import did_you_mean
from zoo.config.build import from_config, instantiate, vocabulary
from zoo.display import new_figure, new_table, write_figure
from zoo.experiments.definition import CONTROL, Run, Sweep, with_capacity
from zoo.experiments.runner import result
from zoo.files.atomic import atomic_write
from zoo.train.results import BITS, rank, vocabularies_differ

FILES = ("sweep.csv", "sweep.png")  # of a sweep, in its folder
WIDE = 120  # columns in which a table of a sweep fits whole


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
    """Each run with its results row, and in it `pairs_at_50` and `pairs_at_90` if it recalled pairs."""
    rows = [result(folder / run.name) for run in runs]
    return [Outcome(run, None if row is None else with_capacity(row)) for run, row in zip(runs, rows, strict=True)]


def cells(sweep: Sweep, results: Sequence[Outcome]) -> list[Cell]:
    """All combinations of values, in order, each at the learning rate with the best median over seeds.

    A learning rate at which every seed passes the gates goes before one at which some seed fails.

    Raises:
        UserError: The results have no number named `sweep.metric`.
    """
    grouped: dict[tuple[tuple[str, str], ...], dict[float | None, list[Outcome]]] = {}
    for outcome in results:
        grouped.setdefault(outcome.run.cell, {}).setdefault(outcome.run.learning_rate, []).append(outcome)
    best_cells = []
    for labels, rates in grouped.items():
        alternatives = []
        for rate, group in rates.items():
            rows = [row for _, row in group if row is not None]
            cell = Cell(dict(labels), rate, rows, [_number(row, sweep.metric, "metric", sweep.mode) for row in rows])
            passed = not any(_failure(sweep, run, row) for run, row in group)
            alternatives.append((not rows, not passed, rank(cell.median, sweep.mode), cell))
        best_cells.append(min(alternatives, key=lambda alternative: alternative[:-1])[-1])
    return best_cells


def _number(row: dict[str, Any], name: str, argument: str, mode: Literal["min", "max"] = "min") -> float:
    """A number in a results row; null, which means NaN, becomes the worst infinity of the mode."""
    row = _flat(row)
    if name not in row:
        numbers = [key for key, value in row.items() if isinstance(value, int | float)]
        raise UserError(
            f"{argument}: {name!r} is not in results.json{did_you_mean(name, numbers)} ({', '.join(numbers)})"
        )
    worst = math.inf if mode == "min" else -math.inf
    return worst if row[name] is None else float(row[name])


def table(sweep: Sweep, results: Sequence[Outcome], width: int = WIDE) -> Table:
    """A table with one row per combination of values: sizes, best learning rate, and the metric over the seeds.

    In fewer than 120 columns of `width`, what the other columns imply is left to `sweep.csv`.
    """
    best, wide = "lowest" if sweep.mode == "min" else "highest", width >= WIDE
    caption = f"{sweep.metric} (best is {best}) of {len(sweep.seeds)} seeds"
    caption += "; ± is the standard deviation" if wide else "; more in sweep.csv"
    if len(sweep.learning_rates) > 1:
        caption += f"; lr: the best of {', '.join(f'{rate:g}' for rate in sweep.learning_rates)} by the median"
        caption += " among those that pass the gates" if sweep.gates else ""
    shown = new_table([], caption=caption)
    columns = [*sweep.axes, *([CONTROL] if sweep.controls else [])]
    rows = cells(sweep, results)
    for column in columns:  # in narrow terminals, labels wrap between words and are never cut
        name = column.split(".")[-1]
        words = [name, *(word for cell in rows for word in cell.labels.get(column, "").split())]
        shown.add_column(name, min_width=max(map(len, words)))
    rates, failing = len(sweep.learning_rates) > 1, {place for place, _ in failures(sweep, results)}
    further = [name.rpartition(".")[2].replace("_", " ") for name in sweep.also]
    complete = [row for _, row in results if row is not None]
    differ = sweep.metric == "val_loss" and vocabularies_differ(complete)
    if differ:
        shown.caption = f"{shown.caption}; the vocabularies differ, so compare bits per byte"
    measured = sweep.metric == "val_loss" and any(row.get(BITS) is not None for row in complete)
    bits = ["bits/byte"] if measured and (differ or wide) else []
    marked = ["gates"] if sweep.gates else []
    sizes, spread = (["params", "state"], ["median", "mean"]) if wide else (["state"], ["median"])
    for column in (*sizes, *(["lr"] if rates else []), *spread, *bits, *further, "all seeds", *marked):
        many = column == "all seeds" or column in further
        shown.add_column(column, justify="right", no_wrap=not many, min_width=5 if many else None)
    for cell in rows:
        row = cell.rows[0] if cell.rows else {}
        shown.add_row(
            *(cell.labels.get(column, "") for column in columns),
            *([_short(row.get("parameters"))] if wide else []),
            _short(row.get("state_size")),
            *([f"{cell.learning_rate:g}"] if rates else []),
            f"{cell.median:.3f}" if cell.values else "",
            *([_mean(cell.values)] if wide else []),
            *([_median([row[BITS] for row in cell.rows if row.get(BITS) is not None], ".3f")] if bits else []),
            *(_median([_number(row, name, "also") for row in cell.rows]) for name in sweep.also),
            " ".join(f"{value:.3f}" for value in sorted(cell.values)),
            *(["" if not cell.values else "failed" if _place(cell.labels) in failing else "passed"] if marked else []),
        )
    return shown


def failures(sweep: Sweep, results: Sequence[Outcome]) -> list[tuple[str, str]]:
    """The cells that fail a gate at their best learning rate, each with what is wrong in one of its runs."""
    failed = []
    for cell in cells(sweep, results) if sweep.gates else []:
        runs = [each for each in results if dict(each.run.cell) == cell.labels]
        for run, row in runs:
            problem = _failure(sweep, run, row) if run.learning_rate == cell.learning_rate else None
            if problem is not None:
                failed.append((_place(cell.labels), f"{_place(cell.labels)}, seed {run.seed}: {problem}"))
    return failed


def _failure(sweep: Sweep, run: Run, row: dict[str, Any] | None) -> str | None:
    """Describe the gate that a run fails; None if it passes, or has no results."""
    concerned = [] if row is None else [gate for gate in sweep.gates if gate.concerns(dict(run.cell))]
    return next((problem for gate in concerned if (problem := gate.failure(_flat(row or {})))), None)


def _place(labels: dict[str, str]) -> str:
    return ", ".join(labels.values())


def _median(values: Sequence[float], digits: str = ".3g") -> str:
    """The median, in three digits; infinity, as of pairs, means that none of the sizes was too much."""
    return "" if not values else "all" if math.isinf(middle := statistics.median(values)) else f"{middle:{digits}}"


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
    columns += ["gates"] if sweep.gates else []
    numbers = list(dict.fromkeys(key for _, row in results if row for key, value in _flat(row).items()))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns, *(key for key in numbers if key not in columns)], lineterminator="\n")
    writer.writeheader()
    for run, row in results:
        place = {"name": run.name, **dict(run.cell), "learning_rate": run.learning_rate, "seed": run.seed}
        gates = {"gates": _failure(sweep, run, row) or "passed"} if sweep.gates and row else {}
        writer.writerow({"status": "missing", **(_flat(row) if row else {}), **place, **gates})
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
    """Plots of the metric and further numbers over `sweep.x`, a panel each.

    A line runs through the medians per value of the other axes, a dot is a seed, an arrow one that is beyond all sizes.
    """
    complete = [cell for cell in cells(sweep, results) if cell.values]
    numbers = [sweep.metric, *sweep.also]
    picture = new_figure(3 + 5 * len(numbers), 4.5)
    for axes, number in zip(picture.subplots(1, len(numbers), squeeze=False)[0], numbers, strict=True):
        _panel(axes, sweep, complete, number)
    handles, labels = picture.axes[0].get_legend_handles_labels()
    if labels:
        picture.legend(handles, labels, loc="outside right center", fontsize="small")
    return picture


def _panel(axes: Axes, sweep: Sweep, complete: Sequence[Cell], number: str) -> None:
    x = sweep.x or next(iter(sweep.axes), "state_size")
    axes.set(xlabel=x.split(".")[-1].replace("_", " "), ylabel=number.replace("val_", "validation ").replace("_", " "))
    values = [[_number(row, number, "also") for row in cell.rows] for cell in complete]
    drawn = [(cell, each) for cell, each in zip(complete, values, strict=True) if CONTROL not in cell.labels]
    lines: dict[str, list[tuple[Cell, list[float]]]] = {}
    apart = [axis for axis in sweep.axes if axis != x] if sweep.lines is None else sweep.lines
    for cell, each in drawn:
        lines.setdefault(", ".join(cell.labels[axis] for axis in apart), []).append((cell, each))
    names = list(dict.fromkeys(cell.labels[x] for cell, _ in drawn)) if x in sweep.axes else []
    ordered = all(map(_is_number, names))  # also true if x is a number in the results
    for place, (name, group) in enumerate(lines.items()):
        at = [names.index(cell.labels[x]) if names else _number(cell.rows[0], x, "x") for cell, _ in group]
        order = sorted(range(len(group)), key=lambda i: at[i])
        color = f"C{place % 10}"
        medians = [statistics.median(group[i][1]) for i in order]
        line = "-" if ordered else "none"  # names have no order
        drawing: dict[str, Any] = {"linestyle": line, "marker": "_", "markersize": 18, "markeredgewidth": 2}
        axes.plot([at[i] for i in order], medians, color=color, label=name or None, **drawing)
        for i in order:
            finite = [value for value in group[i][1] if math.isfinite(value)]
            axes.plot([at[i]] * len(finite), finite, "o", color=color, alpha=0.5, markersize=4)
            if len(finite) < len(group[i][1]):
                axes.plot([at[i]], [0.97], "^", color=color, transform=axes.get_xaxis_transform())
    controls = [(cell, each) for cell, each in zip(complete, values, strict=True) if CONTROL in cell.labels]
    for place, (cell, each) in enumerate(controls):
        style = ("--", ":", "-.")[place % 3]
        axes.axhline(statistics.median(each), color="gray", linestyle=style, label=cell.labels[CONTROL])
    if names:
        axes.set_xticks(range(len(names)), names)
        if max(map(len, names)) > 8:  # each ends at its tick
            axes.tick_params("x", rotation=30)
            for label in axes.get_xticklabels():
                label.set(ha="right", rotation_mode="anchor")
    elif drawn:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))  # 65,536 is 66k
    axes.grid(alpha=0.3)


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True


def write(sweep: Sweep, results: Sequence[Outcome], folder: Path, width: int = WIDE) -> Table:
    """Write `sweep.csv` and `sweep.png` to the folder, and return the table, made for a terminal of `width` columns."""
    shown = table(sweep, results, width)
    table_file, picture_file = (folder / name for name in FILES)
    write_csv(sweep, results, table_file)
    write_figure(figure(sweep, results), picture_file)
    return shown


def preview(runs: Sequence[Run], folder: Path) -> Table:
    """A table of a sweep's runs with their sizes, computed without allocating memory, and whether they are complete."""
    caption = f"FLOPs are forward, per token; runs go to {folder}/NAME"
    shown = Table(caption=caption, caption_justify="left")
    for column in ("run", "parameters", "state", "MFLOP", "status"):
        is_run = column == "run"
        shown.add_column(column, justify="left" if is_run else "right", no_wrap=not is_run, overflow="fold")
    sizes: dict[Any, tuple[str, str, str]] = {}
    vocabularies: dict[str, int | None] = {}  # of data, for which all its files are looked at
    for run in runs:
        if run.cell not in sizes:
            config = run.read() if run.parsed is None else run.parsed.clone()
            data = instantiate("data", config)
            if config.model.vocab_size is None:
                of = repr((config.data, config.model.inputs, config.model.head))
                if of not in vocabularies:
                    vocabularies[of] = vocabulary(config, data)
                config.model.vocab_size = vocabularies[of]
            model, length = from_config(config, device="meta"), getattr(data, "sequence_length", 1)
            flops = f"{model.flops(length) / length / 1e6:.2f}"
            sizes[run.cell] = (f"{model.num_parameters():,}", f"{model.state_size(length):,}", flops)
        status = "complete" if result(folder / run.name) else "to do"
        shown.add_row(run.name, *sizes[run.cell], status)
    return shown
