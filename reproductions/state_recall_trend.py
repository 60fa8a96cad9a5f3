"""The longest context with a given recall over the size of the state, after Figure 2 of
"Scaling up the State Size of RNN LLMs for Long-Context Scenarios".

    python reproductions/state_recall_trend.py 'runs/recall/mixer=*' --output=evaluations/state_recall

Plain arguments are models for `evaluate --tasks=reproductions.state_recall.StateRecall`. Cells in the output are not
measured again.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

import zoo
from kernels import UserError
from reproductions.state_recall import THRESHOLDS
from zoo.config.command_line import arguments_of
from zoo.display import new_figure, write_figure
from zoo.evaluation.results import COLOURS, MARKERS

TASK = "reproductions.state_recall.StateRecall"


def draw(checkpoint: list[str] | str, output: str = "evaluations/state_recall") -> Path:
    """Evaluate models and draw their longest contexts.

    Args:
        checkpoint: Two models or more of different states, as for `evaluate`.
        output: The folder of the evaluation; the figure is `trend.png` in it.

    Returns:
        The file of the figure.

    Raises:
        UserError: As for `evaluate`.
    """
    file = Path(output) / "trend.png"
    write_figure(picture(zoo.evaluate(checkpoint, TASK, output=output)), file)
    return file


def picture(rows: Sequence[dict[str, Any]]) -> Figure:
    """The longest context over the size of the state, a point for each model, with a line for each threshold."""
    points = [row for row in rows if "threshold" in row]
    drawn = new_figure(6.5, 4, dpi=150)
    panel = drawn.add_subplot(xlabel="size of the state (numbers)", ylabel="longest context (tokens)")
    for threshold, colour, marker in zip(THRESHOLDS, COLOURS, MARKERS, strict=False):
        own = [(row["state_size"], row["value"]) for row in points if row["threshold"] == threshold]
        line, label = trend(own), f"recall ≥ {threshold}"
        if line is not None:
            label += f" (R² = {line.r_squared:.2f})"
            at = np.geomspace(min(own)[0], max(own)[0])
            panel.plot(at, line.slope * at + line.intercept, color=colour, alpha=0.6)
        panel.plot(*zip(*own, strict=True), marker, color=colour, markersize=6, label=label)
    sizes = {row["model"]: row["state_size"] for row in points if row["threshold"] == THRESHOLDS[0]}
    for place, model in enumerate(sorted(sizes, key=lambda model: sizes[model])):  # evenly, above the panel
        panel.annotate(
            model,
            (sizes[model], 1),
            ((place + 0.5) / len(sizes), 1.1),
            xycoords=panel.get_xaxis_transform(),
            textcoords="axes fraction",
            annotation_clip=False,
            fontsize="x-small",
            rotation=40,
            arrowprops={"arrowstyle": "-", "color": "0.7", "relpos": (0, 0)},
        )
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
    panel.grid(alpha=0.3)
    drawn.legend(loc="outside right upper", fontsize="small", frameon=False)
    return drawn


class Trend(NamedTuple):
    """The line `longest context = slope · state size + intercept`.

    Attributes:
        slope: Tokens for each number in the state.
        intercept: Tokens.
        r_squared: The share of the variance that the line explains; 1 if there is none.
    """

    slope: float
    intercept: float
    r_squared: float


def trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """The least-squares line through (state size, longest context) of several models; None for fewer than two sizes."""
    sizes, longest = np.array(points, float).reshape(-1, 2).T
    if len(np.unique(sizes)) < 2:
        return None
    slope, intercept = np.polyfit(sizes, longest, 1)
    total = float(((longest - longest.mean()) ** 2).sum())
    rest = float(((longest - slope * sizes - intercept) ** 2).sum())
    return Trend(float(slope), float(intercept), 1 - rest / total if total else 1.0)


if __name__ == "__main__":
    try:
        options = arguments_of(draw, sys.argv[1:], "state_recall_trend", positional="checkpoint")[1]
        sys.stdout.write(f"written to {draw(**options)}\n")
    except UserError as error:
        sys.exit(f"error: {error.on_command_line}")
