"""The metrics of needles in haystacks of "Scaling Laws for Linear Complexity Language Models", appendix B.1.

They are functions of a heatmap `[depths, lengths]`, both in ascending order.
"""

from itertools import groupby

import numpy as np

# The paper says only that it is above 1. With 35 lengths, 1.01 comes within .01 of what table 12 prints for models that
# recall all up to some length and nothing beyond: LLaMA 410M, average .564 and weighted .523; 1B, .478 and .441.
RATIO = 1.01
THRESHOLD = 0.5  # of success; not printed


def weight_map(depths: int, lengths: int, ratio: float = RATIO) -> np.ndarray:
    """Weights `[depths, lengths]` that grow with both: the products of w_i = ratio^(i − 1) for each.

    The paper's first weights w_d0 and w_c0 do not matter, since an average divides by the sum of all weights.
    """
    return np.outer(ratio ** np.arange(depths), ratio ** np.arange(lengths))


def weighted_accuracy(accuracy: np.ndarray, ratio: float = RATIO) -> float:
    """The average of a heatmap with the weights of `weight_map`, 0 … 1.

    Args:
        accuracy: `[depths, lengths]`, 0 … 1: (score − 1) / 9 for scores of 1 … 10.
        ratio: By how much each weight is larger than the one before.
    """
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
    """The weighted accuracy, where each context length counts with its `consistency`, 0 … 1.

    Args:
        accuracy: `[depths, lengths]`, 0 … 1.
        ratio: By how much each weight is larger than the one before.
        threshold: The smallest accuracy that is a success.
    """
    factors = [consistency(column >= threshold) for column in accuracy.T]
    return weighted_accuracy(accuracy * np.array(factors), ratio)
