"""Number of key-value pairs that a model recalls, from its accuracies at several numbers of pairs."""

import math
import re
from collections.abc import Mapping
from typing import Any

_PAIRS = re.compile(r"(?:.*_)?pairs_(\d+)")
LEVELS = {"pairs_at_50": 0.5, "pairs_at_90": 0.9}  # columns, and the accuracies that they stand for


def pairs_at(accuracies: Mapping[int, float], level: float) -> float:
    """The number of pairs at which the accuracy falls below a level, interpolated linearly in log(pairs).

    Args:
        accuracies: Number of pairs → accuracy; at least one.
        level: An accuracy.

    Returns:
        The first crossing: infinity if no accuracy is below the level, 0 if that of the fewest pairs is.
    """
    points = sorted(accuracies.items())
    if points[0][1] < level:
        return 0.0
    for (fewer, above), (more, below) in zip(points, points[1:], strict=False):
        if below < level:
            return fewer * (more / fewer) ** ((above - level) / (above - below))
    return math.inf


def with_capacity(row: dict[str, Any]) -> dict[str, Any]:
    """A results row with `pairs_at_50` and `pairs_at_90`, if its tasks differ in nothing but the number of pairs.

    (At one number of pairs in two lengths there would be two accuracies.)
    """
    tasks = row.get("val_accuracy_by_task") or {}
    accuracies = {int(match[1]): value for name, value in tasks.items() if (match := _PAIRS.fullmatch(name))}
    if len(accuracies) < 2 or len(accuracies) < len(tasks) or None in accuracies.values():
        return row
    return row | {name: pairs_at(accuracies, level) for name, level in LEVELS.items()}
