"""Needles in haystacks: RULER's single and multiple needles, and the pass key of ∞Bench."""

from zoo.data.text.needles import NUMBERS, PASSKEY, UUIDS
from zoo.evaluation.tasks.needle_task import NeedleTask


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


NEEDLE_TASKS = (SingleNeedle1, SingleNeedle2, SingleNeedle3, MultiKey1, MultiKey2, PassKey)
