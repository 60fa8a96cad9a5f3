"""Recall of a model, and its growth with the state ("Scaling up the State Size of RNN LLMs", section 5.5)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zoo.display import new_figure
from zoo.evaluation.loaded import Subject
from zoo.evaluation.results import COLOURS, MARKERS
from zoo.evaluation.task import Cell, Row
from zoo.evaluation.tasks.needles import SingleNeedle3

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THRESHOLDS = (0.5, 0.6, 0.7, 0.8)


class StateRecall(SingleNeedle3):
    """Recall of a uuid in text, at lengths in steps of 512 tokens, with the size of the model's state in every row."""

    name = "state_recall"
    measures = "the longest context in which a uuid is recalled, over the size of the state"
    default_lengths = tuple(range(512, 4097, 512))

    def run(self, subject: Subject, cell: Cell) -> list[Row]:
        """The share of right answers, and the size of the state."""
        return [{**row, "state_size": subject.state_size(cell["length"])} for row in super().run(subject, cell)]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """The longest context with a recall of at least .5, .6, .7 and .8, and the size of the state after it."""
        sizes = {row["length"]: row["state_size"] for row in rows}
        recall = {length: float(np.mean([r["value"] for r in rows if r["length"] == length])) for length in sizes}
        longest = {threshold: longest_context(recall, threshold) for threshold in THRESHOLDS}
        return [
            {
                "metric": f"longest_context_at_{threshold}",
                "threshold": threshold,
                "value": length,
                "state_size": sizes[length or min(sizes)],
            }
            for threshold, length in longest.items()
        ]

    def pictures(self, rows: Sequence[Row]) -> "dict[str, Figure]":
        """The longest context over the size of the state, a point for each model, with a line for each threshold."""
        from matplotlib.ticker import EngFormatter

        points = [row for row in rows if "threshold" in row]
        if len({row["model"] for row in points}) < 2:
            return {}
        picture = new_figure(6.5, 4, dpi=150)
        panel = picture.add_subplot(xlabel="size of the state (numbers)", ylabel="longest context (tokens)")
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
        picture.legend(loc="outside right upper", fontsize="small", frameon=False)
        return {f"{self.name}-trend": picture}


def longest_context(recall: dict[int, float], threshold: float) -> int:
    """The longest length up to which the recall stays at or above a threshold; 0 if it is below at the shortest.

    Args:
        recall: Length → recall, 0 … 1.
        threshold: The smallest recall.
    """
    longest = 0
    for length in sorted(recall):
        if recall[length] < threshold:
            break
        longest = length
    return longest


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
