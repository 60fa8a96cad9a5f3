"""Needles in haystacks: RULER's single and multiple needles, the pass key of ∞Bench, and recall over the state."""

from collections.abc import Sequence

import numpy as np

from zoo.data.text.needles import NUMBERS, PASSKEY, UUIDS
from zoo.evaluation.loaded import LoadedModel
from zoo.evaluation.task import Cell, Row
from zoo.evaluation.tasks.needle_task import NeedleTask

THRESHOLDS = (0.5, 0.6, 0.7, 0.8)


class SingleNeedle1(NeedleTask):
    """RULER's niah_single_1."""

    name = "s_niah_1"
    measures = "recall of a 7-digit number hidden in repeated noise (S-NIAH-1)"
    wording = NUMBERS
    text = "noise"


class SingleNeedle2(NeedleTask):
    """RULER's niah_single_2."""

    name = "s_niah_2"
    measures = "recall of a 7-digit number hidden in text (S-NIAH-2)"
    wording = NUMBERS


class SingleNeedle3(NeedleTask):
    """RULER's niah_single_3."""

    name = "s_niah_3"
    measures = "recall of a uuid hidden in text (S-NIAH-3)"
    wording = UUIDS


class MultiKey1(NeedleTask):
    """RULER's niah_multikey_1."""

    name = "m_niah_1"
    measures = "recall of one of four 7-digit numbers hidden in text (M-NIAH)"
    wording = NUMBERS
    needles = 4


class MultiKey2(NeedleTask):
    """RULER's niah_multikey_2."""

    name = "m_niah_2"
    measures = "recall of one 7-digit number in a haystack of needles (M-NIAH)"
    wording = NUMBERS
    text = "needles"


class PassKey(NeedleTask):
    """The pass key of ∞Bench, as in table 7 of StateX."""

    name = "passkey"
    measures = "recall of a pass key of 5 digits hidden in repeated noise"
    wording = PASSKEY
    text = "noise"
    max_new_tokens = 32


class StateRecall(SingleNeedle3):
    """Recall of a uuid in text, at lengths in steps of 512 tokens, with the size of the model's state in every row.

    It is that of "Scaling up the State Size of RNN LLMs", section 5.5.
    """

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


NEEDLE_TASKS = (SingleNeedle1, SingleNeedle2, SingleNeedle3, MultiKey1, MultiKey2, PassKey, StateRecall)
