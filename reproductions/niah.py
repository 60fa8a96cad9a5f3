"""Needles in haystacks at 35 depths, in the easy and the standard mode of the scaling-law paper."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from zoo.data.text.needles import EASY, STANDARD
from zoo.evaluation.loaded import LoadedModel
from zoo.evaluation.task import Cell, Row
from zoo.evaluation.tasks.needle_task import NeedleTask

# The paper says only that it is above 1. With 35 lengths, 1.01 comes within .01 of what table 12 prints for models that
# recall all up to some length and nothing beyond: LLaMA 410M, average .564 and weighted .523; 1B, .478 and .441.
RATIO = 1.01
THRESHOLD = 0.5  # the smallest accuracy that is a success; not printed


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

    def cells(self, subject: LoadedModel) -> list[Cell]:
        """A cell for each length, with all depths."""
        return [{"length": length} for length in self.lengths(subject)]

    def run(self, subject: LoadedModel, cell: Cell) -> list[Row]:
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


def weight_map(depths: int, lengths: int, ratio: float = RATIO) -> np.ndarray:
    """Weights `[depths, lengths]` that grow with both: the products of w_i = ratio^(i − 1) for each (appendix B.1).

    The paper's first weights w_d0 and w_c0 do not matter, since an average divides by the sum of all weights.
    """
    return np.outer(ratio ** np.arange(depths), ratio ** np.arange(lengths))


def weighted_accuracy(accuracy: np.ndarray, ratio: float = RATIO) -> float:
    """Average accuracies `[depths, lengths]`, both ascending, by the weights of `weight_map`; 0 … 1."""
    return float(np.average(accuracy, weights=weight_map(len(accuracy), accuracy.shape[1], ratio)))


def consistency(success: np.ndarray) -> float:
    """The factor p of a context length, from its successes over all depths, `[depths]` bool.

    1 if the needle is found at every depth, 0 if at none, otherwise 2^((1 − n)/2), where n is the number of continuous
    segments of either successes or failures.
    """
    if success.all() or not success.any():
        return float(success.all())
    segments = sum(1 for _ in groupby(success.tolist()))
    return 2 ** ((1 - segments) / 2)


def niah_score(accuracy: np.ndarray, ratio: float = RATIO, threshold: float = THRESHOLD) -> float:
    """The weighted accuracy, where each context length counts with its `consistency`, 0 … 1."""
    factors = [consistency(column >= threshold) for column in accuracy.T]
    return weighted_accuracy(accuracy * np.array(factors), ratio)
