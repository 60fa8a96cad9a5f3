"""Recall over the size of the state, as in "Scaling up the State Size of RNN LLMs for Long-Context Scenarios".

python cli.py evaluate --checkpoint runs/a --checkpoint runs/b --tasks=reproductions.state_recall.StateRecall
"""

from collections.abc import Sequence

import numpy as np

from zoo.evaluation.loaded import LoadedModel
from zoo.evaluation.task import Cell, Row
from zoo.evaluation.tasks.needles import SingleNeedle3

THRESHOLDS = (0.5, 0.6, 0.7, 0.8)


class StateRecall(SingleNeedle3):
    """Recall of a uuid in text, at lengths in steps of 512 tokens, with the size of the model's state (section 5.5)."""

    name = "state_recall"
    measures = "the longest context in which a uuid is recalled, over the size of the state"
    default_lengths = tuple(range(512, 4097, 512))

    def run(self, subject: LoadedModel, cell: Cell) -> list[Row]:
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
