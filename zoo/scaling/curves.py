"""Training curves as scaling laws see them: losses over tokens and compute."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from zoo.scaling.power import Numbers

PF_DAY = 8.64e19  # FLOPs


@dataclass(frozen=True)
class Curve:
    """The losses of one run while it was trained.

    Args:
        run: Its name.
        mixer: What laws are compared by.
        size: Parameters without embeddings and head.
        flops_per_token: Training FLOPs of a token, three times the forward pass.
        tokens: Tokens seen [P], rising.
        losses: Training losses in nats per token [P].
    """

    run: str
    mixer: str
    size: float
    flops_per_token: float
    tokens: Numbers
    losses: Numbers

    @property
    def flops(self) -> Numbers:
        """Compute so far [P]."""
        return self.tokens * self.flops_per_token

    def at(self, flops: Numbers) -> Numbers:
        """Losses at given compute, between points on straight lines over log compute; NaN outside of the curve."""
        return np.interp(np.log(flops), np.log(self.flops), self.losses, left=np.nan, right=np.nan)

    def smoothed(self, width: float) -> "Curve":
        """Each loss is the mean of those at 1/(1 + width) to 1 + width times its tokens."""
        sums = np.concatenate([[0.0], np.cumsum(self.losses)])
        first = np.searchsorted(self.tokens, self.tokens / (1 + width), side="left")
        last = np.searchsorted(self.tokens, self.tokens * (1 + width), side="right")
        return replace(self, losses=(sums[last] - sums[first]) / (last - first))


def sizes(curves: Sequence[Curve]) -> list[float]:
    """The different sizes, rising."""
    return sorted({curve.size for curve in curves})


class Ladder(NamedTuple):
    """The sizes of a mixer's runs at given compute.

    Attributes:
        sizes: [S], rising.
        losses: Averaged over runs of the same size [S,C]; NaN where not all of them have got there.
        tokens: That the compute pays for [S,C].
    """

    sizes: Numbers
    losses: Numbers
    tokens: Numbers


def ladder(curves: Sequence[Curve], flops: Numbers) -> Ladder:
    """The sizes of a mixer's runs at given compute [C]."""
    model_sizes = sizes(curves)
    groups = [[curve for curve in curves if curve.size == size] for size in model_sizes]
    losses = np.stack([np.mean([curve.at(flops) for curve in group], axis=0) for group in groups])
    tokens = np.stack([flops / group[0].flops_per_token for group in groups])
    return Ladder(np.array(model_sizes), losses, tokens)
