"""The pictures of a report, by Bokeh: curves that can be hovered, and heatmaps.

Of the well-kept libraries, Bokeh is the one whose whole code fits into the page: 1.3 MB, where plotly has 4.8 MB; and
Vega-Lite, at .8 MB, needs a renderer of 34 MB to be installed to write it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from zoo.evaluation.results import COLOURS, is_fraction, mean
from zoo.report.checks import Plain
from zoo.report.folders import Run
from zoo.report.tables import axis_of
from zoo.train.metrics_file import is_number

POINTS, MOST = 400, 40_000  # of a curve, and of all curves of a page
LEGEND = 24  # lines, beyond which a legend hides more than it says
DASHES = ("solid", "dashed", "dotted")  # one for each round of the colours
WIDE, HIGH = 540, 320
LOSSES = {"train_loss": "Training loss", "val_loss": "Validation loss", "val_accuracy": "Validation accuracy"}


def losses(runs: Sequence[Run]) -> dict[str, Any]:
    """Name → picture: the training and the validation loss over tokens, a line for each run."""
    drawn, most = {}, max(20, min(POINTS, MOST // max(len(runs), 1)))
    for name, title in LOSSES.items():
        lines = {}
        for run in runs:
            points = [(row["tokens"], row[name]) for row in run.metrics if _has(row, "tokens") and _has(row, name)]
            if points:
                at = np.unique(np.linspace(0, len(points) - 1, min(len(points), most)).astype(int))
                with np.errstate(over="ignore"):  # beyond its range it is infinity, which is not drawn
                    lines[run.name] = np.array(points, np.float64)[at].astype(np.float32)
        if any(len(line) > 1 for line in lines.values()):
            drawn[title] = curves(title, lines, "tokens", "accuracy" if "accuracy" in name else "nats per token")
            drawn[title].sizing_mode = "stretch_width"
    return drawn


def has_line(run: Run) -> bool:
    """Return whether the run has at least two points of a loss."""
    return any(sum(_has(row, "tokens") and _has(row, name) for row in run.metrics) > 1 for name in LOSSES)


def _has(row: Plain, name: str) -> bool:
    return row.get(name) is not None


def evaluated(task: str, rows: Sequence[Plain]) -> dict[str, Any]:
    """Name → picture: heatmaps over depth and length, curves over the task's axis and over positions."""
    drawn: dict[str, Any] = {}
    deep = [row for row in rows if "depth" in row and "length" in row and row["value"] is not None]
    for model in dict.fromkeys(row["model"] for row in deep):
        drawn[f"{task}, {model}"] = heatmap(f"{task}: {model}", [row for row in deep if row["model"] == model])
    longest = max((row["length"] for row in rows if "position" in row and "length" in row), default=None)
    parts = {"position": [row for row in rows if "position" in row and row.get("length") == longest]}
    if (axis := axis_of(rows)) is not None:
        parts[axis] = [row for row in rows if is_number(row.get(axis)) and "position" not in row]
    for over, chosen in parts.items():
        for metric in dict.fromkeys(row["metric"] for row in chosen):
            lines = _lines([row for row in chosen if row["metric"] == metric], over)
            if any(len(line) > 1 for line in lines.values()):
                x, y = over.replace("_", " "), metric.replace("_", " ")
                drawn[f"{task}: {y} over {x}"] = curves(f"{task}: {y} over {x}", lines, x, y)
    return drawn


def _lines(rows: Sequence[Plain], over: str) -> dict[str, Any]:
    """The means of a metric over an axis, by model and subtask."""
    rows_of: dict[str, dict[float, list[Plain]]] = {}
    for row in rows:
        line = f"{row['model']} {row.get('subtask', '')}".strip()
        rows_of.setdefault(line, {}).setdefault(row[over], []).append(row)
    means = {line: [(x, mean(points[x])) for x in sorted(points)] for line, points in rows_of.items()}
    return {
        line: np.array([p for p in points if p[1] is not None], np.float64).reshape(-1, 2)
        for line, points in means.items()
    }


def curves(title: str, lines: dict[str, Any], x: str, y: str) -> Any:
    """A line for each array of points [N,2]; a click on a name in the legend hides its line."""
    from bokeh.models import Legend, LegendItem, NumeralTickFormatter, Range1d
    from bokeh.plotting import ColumnDataSource, figure

    drawn = figure(title=title, width=WIDE, height=HIGH, x_axis_label=x, y_axis_label=y)
    drawn.add_tools(_hover([("", "$name"), (x, "@x{0,0}"), (y, "@y{0.0000}")]))
    drawn.toolbar.logo = None  # a link to the network
    if is_fraction(y):
        drawn.y_range = Range1d(-0.03, 1.03)
    drawn.xaxis.formatter = NumeralTickFormatter(format="0.[0]a")
    items = []
    for index, (name, points) in enumerate(lines.items()):
        source = ColumnDataSource({"x": points[:, 0], "y": points[:, 1]})
        style = {"color": COLOURS[index % len(COLOURS)], "name": name}
        dash = DASHES[index // len(COLOURS) % len(DASHES)]
        marks = [drawn.line("x", "y", source=source, line_width=1.6, line_dash=dash, **style)]
        if len(points) <= 40:
            marks.append(drawn.scatter("x", "y", source=source, size=5, **style))
        items.append(LegendItem(label=name, renderers=marks))
    if len(items) <= LEGEND:
        legend = Legend(items=items, click_policy="hide", label_text_font_size="8pt", border_line_alpha=0, spacing=0)
        drawn.add_layout(legend, "right")
    return drawn


def heatmap(title: str, rows: Sequence[Plain]) -> Any:
    """The depth of the needle over the length, a cell for each."""
    from bokeh.models import ColorBar, LinearColorMapper
    from bokeh.plotting import ColumnDataSource, figure

    cells: dict[tuple[str, str], list[Plain]] = {}
    for row in rows:
        cells.setdefault((f"{row['length']:g}", f"{100 * row['depth']:g} %"), []).append(row)
    lengths = dict.fromkeys(f"{length:g}" for length in sorted({row["length"] for row in rows}))
    depths = dict.fromkeys(f"{100 * depth:g} %" for depth in sorted({row["depth"] for row in rows}, reverse=True))
    values = [mean(cell_rows) for cell_rows in cells.values()]
    metric = rows[0]["metric"]
    present = [value for value in values if value is not None]
    ends = (0.0, 1.0) if is_fraction(metric) else (min(present, default=0.0), max(present, default=1.0))
    mapper = LinearColorMapper(palette="Viridis256", low=ends[0], high=ends[1], nan_color="lightgrey")
    columns = {
        "length": [length for length, _ in cells],
        "depth": [depth for _, depth in cells],
        "value": [np.nan if value is None else value for value in values],
    }
    drawn = figure(
        title=title,
        width=min(WIDE, 240 + 60 * len(lengths)),
        height=130 + 30 * len(depths),
        x_range=[*lengths],
        y_range=[*depths],
        x_axis_label="length in tokens",
        y_axis_label="depth of the needle",
    )
    drawn.toolbar.logo = None
    colour = {"field": "value", "transform": mapper}
    drawn.rect("length", "depth", 1, 1, source=ColumnDataSource(columns), fill_color=colour, line_color=None)
    drawn.add_tools(_hover([("length", "@length"), ("depth", "@depth"), (metric.replace("_", " "), "@value{0.000}")]))
    drawn.add_layout(ColorBar(color_mapper=mapper, title=metric.replace("_", " ")), "right")
    drawn.grid.visible = False
    return drawn


def _hover(tooltips: list[tuple[str, str]]) -> Any:
    from bokeh.models import HoverTool

    return HoverTool(tooltips=tooltips)
