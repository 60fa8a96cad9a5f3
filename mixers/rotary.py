"""Rotary positions for sequences longer than a model was first trained on: pairs turn more slowly."""

import math

from torch import Tensor

import kernels

from .arguments import check_numbers, check_sizes
from .features import Rotary


class LinearRotary(Rotary):
    """Rotary positions divided by a factor: position interpolation (arXiv 2306.15595).

    Args:
        heads: Number of heads.
        size: Size of a head.
        factor: How many times more slowly each pair turns.
        base, fraction: As for Rotary.
    """

    def __init__(self, heads: int, size: int, *, factor: float, base: float = 10000.0, fraction: float = 1.0):
        super().__init__(heads, size, base=base, fraction=fraction)
        check_numbers({"factor": factor})
        self.factor = factor

    def frequencies(self, pair: Tensor) -> Tensor:
        return super().frequencies(pair) / self.factor


class Llama3Rotary(LinearRotary):
    """Rotary positions of Llama 3.1 (arXiv 2407.21783): slow pairs turn `factor` times more slowly, fast ones do not.

    A pair is slow if it turns at most `slow_turns` times in `original_length` tokens, and fast if at least `fast_turns`
    times. In between its frequency is interpolated.

    Args:
        heads: Number of heads.
        size: Size of a head.
        factor: How many times more slowly slow pairs turn.
        original_length: Tokens of the sequences that the model was first trained on.
        slow_turns: Turns of a slow pair, at most.
        fast_turns: Turns of a fast pair, at least.
        base, fraction: As for Rotary.
    """

    def __init__(
        self,
        heads: int,
        size: int,
        *,
        factor: float,
        original_length: int,
        slow_turns: float = 1.0,
        fast_turns: float = 4.0,
        base: float = 10000.0,
        fraction: float = 1.0,
    ):
        super().__init__(heads, size, factor=factor, base=base, fraction=fraction)
        check_sizes({"original_length": original_length})
        check_numbers({"slow_turns": slow_turns, "fast_turns": fast_turns})
        if fast_turns <= slow_turns:
            raise kernels.UserError(f"fast_turns: {fast_turns} must be above slow_turns, {slow_turns}")
        self.original_length, self.slow_turns, self.fast_turns = original_length, slow_turns, fast_turns

    def frequencies(self, pair: Tensor) -> Tensor:
        frequencies = Rotary.frequencies(self, pair)
        turns = frequencies * (self.original_length / (2 * math.pi))
        kept = ((turns - self.slow_turns) / (self.fast_turns - self.slow_turns)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


class YarnRotary(LinearRotary):
    """Rotary positions of YaRN (arXiv 2309.00071): slow pairs turn `factor` times more slowly, and all become longer.

    From the pair that turns `fast_turns` times in `original_length` tokens to the one that turns `slow_turns` times,
    frequencies are interpolated by the number of the pair.

    Args:
        heads: Number of heads.
        size: Size of a head.
        factor: How many times more slowly slow pairs turn.
        original_length: Tokens of the sequences that the model was first trained on.
        slow_turns: Turns of the first pair that turns `factor` times more slowly.
        fast_turns: Turns of the last pair that is left alone.
        amplitude: Factor of queries and keys where they turn; null for 1 + 0.1 ln(factor).
        whole: Whether the interpolation starts and ends at whole numbers of pairs.
        base, fraction: As for Rotary.
    """

    def __init__(
        self,
        heads: int,
        size: int,
        *,
        factor: float,
        original_length: int,
        slow_turns: float = 1.0,
        fast_turns: float = 32.0,
        amplitude: float | None = None,
        whole: bool = True,
        base: float = 10000.0,
        fraction: float = 1.0,
    ):
        super().__init__(heads, size, factor=factor, base=base, fraction=fraction)
        check_sizes({"original_length": original_length})
        check_numbers({"slow_turns": slow_turns, "fast_turns": fast_turns, "amplitude": amplitude})
        if base <= 1:
            raise kernels.UserError(f"base: {base} must be above 1 for YaRN")
        self.original_length, self.slow_turns, self.fast_turns = original_length, slow_turns, fast_turns
        self.whole = whole
        self.amplitude = amplitude or 1 + 0.1 * math.log(max(factor, 1.0))

    def frequencies(self, pair: Tensor) -> Tensor:
        frequencies = Rotary.frequencies(self, pair)
        first, last = self._pair_with(self.fast_turns), self._pair_with(self.slow_turns)
        if self.whole:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.turning - 1)
        slowed = ((pair - first) / (last - first or 0.001)).clamp(0, 1)
        return frequencies * (1 - slowed + slowed / self.factor)

    def _pair_with(self, turns: float) -> float:
        """The number of the pair that turns so many times in `original_length` tokens."""
        return self.turning * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(self.base))
