"""Results of tasks: a table for the terminal, and figures fit for a paper."""

import glob
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from zoo.display import new_figure, new_table, write_figure
from zoo.evaluation.record import FILE
from zoo.evaluation.task import Row, Task
from zoo.files.output import check_no_others

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with colour blindness can tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "osD^vP*X"
FORMATS = ("png", "svg")  # of each picture
PANELS_ACROSS = 6  # heatmaps side by side
LABELS = 12  # on an axis of a heatmap, at most
COLUMNS = 8  # values of an axis that a table shows of more than `LABELS`
OVERVIEW = "overview"  # name of the picture of all tasks
UNITS = {"loss": "loss (nats per token)", "ms_per_token": "time per token (ms)", "state_mib": "state (MiB)"}
FRACTIONS = ("acc", "acc_norm", "niah_score")  # metrics from 0 to 1, in addition to every accuracy


def table(task: Task, rows: Sequence[Row]) -> Table:
    """A task's results: a line for each model and metric, a column for each value of the task's axis."""
    measured, lines = by_axis(rows, task.axis)
    columns, has_axis = spaced(measured), measured not in ([], [None])
    some = f", some of {len({*measured} - {None})}; the files have all" if columns != measured else ""
    captions = [f"columns: {task.axis.replace('_', ' ')}{some}"] if has_axis else []
    captions += ["accuracies in %"] if any(is_fraction(row["metric"]) for row in rows) else []
    headings = [_number(column) if column is not None else "all" if has_axis else "value" for column in columns]
    shown = new_table(["model", "metric", *headings], left=2, wrapped=["metric"], caption="\n".join(captions))
    for (model, metric), rows_at in lines.items():
        shown.add_row(model, metric.replace("_", " "), *(_cell(rows_at.get(column, [])) for column in columns))
    return shown


def overview(tasks: Sequence[Task], rows: Sequence[Row]) -> Table:
    """All tasks in one table: a line for each metric at each value of a task's axis, a column for each model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    shown = new_table(["task", "metric", "at", *models], left=2, caption="at: length or number; accuracies in %")
    for task in tasks:
        values, lines = by_axis((row for row in rows if row["task"] == task.name), task.axis)
        for metric, value in itertools.product(dict.fromkeys(metric for _, metric in lines), values):
            cells = [_cell(lines.get((model, metric), {}).get(value, [])) for model in models]
            if any(cells):
                at = "" if value is None else _number(value)
                shown.add_row(task.name, metric.replace("_", " "), at, *cells)
    return shown


def by_axis(rows: Iterable[Row], axis: str) -> tuple[list[Any], dict[tuple[str, str], dict[Any, list[Row]]]]:
    """Group rows for a table, without those by position, of which there is a picture.

    Returns:
        The values of the axis, and None at the end for rows without it; (model, subtask and metric) → value → rows.
    """
    lines: dict[tuple[str, str], dict[Any, list[Row]]] = {}
    for row in rows:
        if "position" not in row:
            line = lines.setdefault((row["model"], f"{row.get('subtask', '')} {row['metric']}".strip()), {})
            line.setdefault(row.get(axis), []).append(row)
    values = {value for line in lines.values() for value in line}
    return [*sorted(value for value in values if value is not None), *({None} & values)], lines


def spaced(columns: list[Any]) -> list[Any]:
    """Return the columns that fit into a table: values evenly spaced from the first to the last, and None as it was."""
    values = [value for value in columns if value is not None]
    if len(values) <= LABELS:
        return columns
    return [values[round(place)] for place in np.linspace(0, len(values) - 1, COLUMNS)] + columns[len(values) :]


def is_fraction(metric: str) -> bool:
    """Return whether a metric goes from 0 to 1."""
    return metric in FRACTIONS or metric.endswith("accuracy")


def _cell(rows: Sequence[Row]) -> str:
    """The mean of some rows of one metric, as text."""
    if (value := mean(rows)) is None:
        return ""
    if is_fraction(rows[0]["metric"]):
        return f"{100 * value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def mean(rows: Iterable[Row]) -> float | None:
    """The mean of rows, weighted by their counts; None without any value."""
    pairs = [(row.get("count", 1), row["value"]) for row in rows if row["value"] is not None]
    total = sum(count for count, _ in pairs)
    return sum(count * value for count, value in pairs) / total if total else None


def write_pictures(drawn: "Mapping[str, Figure]", folder: Path) -> None:
    """Write pictures to a folder, by name, each as PNG and SVG."""
    for name, picture in drawn.items():
        for form in FORMATS:
            write_figure(picture, folder / f"{name}.{form}")


def check_pictures(tasks: Iterable[Task], folder: Path) -> None:
    """Raise a UserError if a folder without records of an evaluation has files with names of the tasks' pictures."""
    if (file := folder / FILE).exists() and file.stat().st_size:
        return
    stems = [OVERVIEW, *(glob.escape(_stem(task)) for task in tasks)]
    patterns = [f"{stem}{part}.{form}" for stem in stems for part in ("", "-*") for form in FORMATS]
    check_no_others((path for pattern in patterns for path in sorted(folder.glob(pattern))), "output", FILE)


def _stem(task: Task) -> str:
    """Return the beginning of the names of a task's pictures."""
    return task.name.replace("/", "-")


def pictures(task: Task, rows: Sequence[Row]) -> "dict[str, Figure]":
    """Name → picture: heatmaps over depth and length, and curves over the task's axis or positions."""
    stem = _stem(task)
    drawn = {}
    if any("depth" in row for row in rows):
        drawn[f"{stem}-depth"] = heatmaps(task, [row for row in rows if "depth" in row])
    over_axis = [row for row in rows if task.axis in row and "position" not in row]
    if len(_values(over_axis, task.axis)) > 1:
        drawn[stem] = curves(over_axis, task.axis, task.name)
    longest = max((row["length"] for row in rows if "position" in row), default=None)
    if longest is not None:
        by_position = [row for row in rows if "position" in row and row["length"] == longest]
        drawn[f"{stem}-position"] = curves(by_position, "position", f"{task.name}, {_number(longest)} tokens")
    return drawn


def curves(rows: Sequence[Row], axis: str, title: str) -> "Figure":
    """A line for each model, with its 95 % interval or a dot for each seed; one panel for each metric."""
    metrics = dict.fromkeys(row["metric"] for row in rows)
    return _panels([("", axis, [row for row in rows if row["metric"] == metric]) for metric in metrics], title)


def overview_picture(tasks: Sequence[Task], rows: Sequence[Row]) -> "Figure | None":
    """The curves of all tasks, a panel for each metric; None if no task has an axis."""
    panels = []
    for task in tasks:
        own = [row for row in rows if row["task"] == task.name and task.axis in row and "position" not in row]
        for metric in dict.fromkeys(row["metric"] for row in own):
            panels.append((task.name, task.axis, [row for row in own if row["metric"] == metric]))
    return _panels(panels, "overview") if panels else None


def _panels(panels: Sequence[tuple[str, str, Sequence[Row]]], title: str) -> "Figure":
    """Panels of curves, each with its title, its axis and the rows of its metric."""
    from matplotlib.transforms import offset_copy

    models = list(dict.fromkeys(row["model"] for _, _, rows in panels for row in rows))
    across = min(3, len(panels))
    picture = _figure(1.2 + 3.8 * across, 3.4 * math.ceil(len(panels) / across))
    for number, (heading, axis, rows) in enumerate(panels, start=1):
        metric = rows[0]["metric"]
        panel: Axes = picture.add_subplot(math.ceil(len(panels) / across), across, number)
        for index, model in enumerate(models):
            own = [row for row in rows if row["model"] == model and row["value"] is not None]
            points = defaultdict(list)
            for row in own:
                points[row[axis]].append(row)
            at = sorted(points)
            style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "label": model}
            style["linestyle"] = ("-", "--", ":")[index // len(COLOURS) % 3]  # colours come again, with other dashes
            means = np.array([mean(points[x]) for x in at], float)
            drawn: list[Artist] = [*panel.plot(at, means, marker=MARKERS[index % len(MARKERS)], markersize=5, **style)]
            if any(len(points[x]) > 1 for x in at):  # several seeds: a dot for each
                seeds = [(x, row["value"]) for x in at for row in points[x]]
                drawn += panel.plot(*zip(*seeds, strict=True), "o", color=style["color"], alpha=0.35, markersize=3)
            elif all("low" in points[x][0] for x in at):
                low, high = ([points[x][0][end] for x in at] for end in ("low", "high"))
                drawn.append(panel.fill_between(at, low, high, color=style["color"], alpha=0.15, linewidth=0))
            shift = 1.2 * (index - (len(models) - 1) / 2)  # side by side, so that equal values are all visible
            for artist in drawn:
                artist.set_transform(offset_copy(panel.transData, picture, x=shift, units="points"))
        panel.margins(x=0.1)
        _scale(panel, _values(rows, axis), axis)
        panel.set(ylabel=UNITS.get(metric, metric.replace("_", " ")), title=heading)
        if is_fraction(metric):
            panel.set_ylim(-0.03, 1.03)
        elif metric.endswith(("_per_second", "_gib", "_mib", "_per_token")):
            panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    picture.suptitle(title)
    if len(models) > 1 or len(panels) == 1:
        handles, labels = picture.axes[0].get_legend_handles_labels()
        picture.legend(handles, labels, loc="outside right center", fontsize="small", frameon=False)
    return picture


def heatmaps(task: Task, rows: Sequence[Row]) -> "Figure":
    """Depth of the needle over length, a panel for each model."""
    models, lengths = list(dict.fromkeys(row["model"] for row in rows)), _values(rows, "length")
    depths = _values(rows, "depth")
    across = min(len(models), PANELS_ACROSS)
    down = math.ceil(len(models) / across)
    width, height = min(0.45 * len(lengths), 6), min(0.28 * len(depths), 6)
    picture = _figure(1.5 + across * (0.9 + width), down * (1.4 + height))
    panels = picture.subplots(down, across, sharey=True, squeeze=False)
    image = None
    for panel in panels.flat[len(models) :]:
        panel.set_axis_off()
    for panel, model in zip(panels.flat, models, strict=False):
        grid = [
            [
                mean(r for r in rows if (r["model"], r["depth"], r["length"]) == (model, depth, length))
                for length in lengths
            ]
            for depth in depths
        ]
        image = panel.imshow(np.array(grid, float), cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for axis, labels in (
            (panel.xaxis, [_number(length) for length in lengths]),
            (panel.yaxis, [f"{100 * depth:.0f} %" for depth in depths]),
        ):
            step = math.ceil(len(labels) / LABELS)
            axis.set_ticks(range(0, len(labels), step), labels[::step])
        panel.tick_params("x", rotation=45)
        panel.set(title=model, xlabel="length in tokens")
    for panel in panels[:, 0]:
        panel.set_ylabel("depth of the needle")
    if image is not None:
        picture.colorbar(image, ax=list(panels.flat), label=rows[0]["metric"].replace("_", " "))
    picture.suptitle(task.name)
    return picture


def _figure(width: float, height: float) -> "Figure":
    return new_figure(max(width, 4.5), max(height, 3.2), dpi=150)


def _scale(panel: "Axes", values: Sequence[float], axis: str) -> None:
    unit = " in tokens" if axis in ("length", "position") else ""
    panel.set_xlabel(axis.replace("_", " ") + unit)
    even = len({after - before for before, after in itertools.pairwise(values)}) == 1
    if min(values) > 0 and max(values) >= 4 * min(values) and not even:
        panel.set_xscale("log", base=2)
        panel.xaxis.set_ticks([], minor=True)
    if len(values) <= 8:
        panel.set_xticks(values)
    panel.xaxis.set_major_formatter(lambda value, _: _number(value))


def _values(rows: Iterable[Row], name: str) -> list[Any]:
    return sorted({row[name] for row in rows if name in row})


def _number(value: float) -> str:
    """1024 → 1k, 1536 → 1.5k, 1500 → 1500."""
    if value >= 1024 and value % 512 == 0:
        return f"{value / 1024:g}k"
    return f"{value:g}"
