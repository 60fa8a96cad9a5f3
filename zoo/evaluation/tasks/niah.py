"""Needles in haystacks at 35 depths, in the easy and the standard mode of the scaling-law paper."""

from collections.abc import Sequence

import numpy as np

from zoo.data.text.needles import EASY, STANDARD
from zoo.evaluation.loaded import Subject
from zoo.evaluation.task import Cell, Row
from zoo.evaluation.tasks.needle_task import NeedleTask
from zoo.evaluation.tasks.niah_score import niah_score, weighted_accuracy


class NiahEasy(NeedleTask):
    """The question comes before the answer in the haystack.

    The paper scores an answer from 1 to 10 and takes (score − 1) / 9, but does not say how. Here it is 10 if the
    continuation contains the value, and otherwise 1.
    """

    name = "niah_easy"
    measures = "recall of a question and its answer in text over depth and length, and the NIAH score"
    wording = EASY
    max_new_tokens = 64
    default_lengths = (512, 1024, 1536, 2048)
    default_samples = 1
    default_depths = tuple(np.linspace(0, 1, 35).round(6).tolist())

    def cells(self, subject: Subject) -> list[Cell]:
        """A cell for each length, with all depths."""
        return [{"length": length} for length in self.lengths(subject)]

    def run(self, subject: Subject, cell: Cell) -> list[Row]:
        """The accuracy at each depth."""
        cells = [{**cell, **place} for place in self.places]
        right = self.answers(subject, [(deep, number) for deep in cells for number in range(self.samples)])
        return [self.accuracy(deep, right[i * self.samples :][: self.samples]) for i, deep in enumerate(cells)]

    def summary(self, rows: Sequence[Row]) -> list[Row]:
        """Average, weighted accuracy and NIAH score over all depths and lengths."""
        ordered = sorted(rows, key=lambda row: (row["depth"], row["length"]))
        heatmap = np.array([row["value"] for row in ordered]).reshape(len(self.places), -1)
        metrics = {
            "average_accuracy": float(heatmap.mean()),
            "weighted_accuracy": weighted_accuracy(heatmap),
            "niah_score": niah_score(heatmap),
        }
        count = sum(row["count"] for row in rows)
        return [{"metric": metric, "value": value, "count": count} for metric, value in metrics.items()]


class NiahStandard(NiahEasy):
    """Only the answer is in the haystack."""

    name = "niah_standard"
    measures = "recall of an answer in text, without its question, over depth and length, and the NIAH score"
    wording = STANDARD
