"""Word problems whose sequences become longer during training, for `mamba3_parity.yaml`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.errors import UserError
from zoo.data.batch import NO_LOSS
from zoo.data.order import real
from zoo.data.synthetic.task import Seeds
from zoo.data.synthetic.word_problem import WordProblem


@dataclass(eq=False, repr=False)
class GrowingWordProblem(WordProblem):
    """`WordProblem` as a curriculum: each sample has a random number of labels, whose maximum grows by stages.

    Samples have `length` tokens, of which only the first ones have labels. Their number is uniform from `shortest` to
    the maximum of the stage. Sample i belongs to stage i // `samples`, or to the last one, so the length is a function
    of the sample alone. It must be the only task of a run that does not repeat samples.

    Args:
        group: parity, S3 or A5.
        length: Tokens in a sequence; at least the last maximum.
        weight: Relative frequency of training batches of this task.
        shortest: Smallest number of labels.
        longest: Maximum of each stage.
        samples: Samples in a stage.

    Raises:
        UserError: An argument is out of range.
    """

    shortest: int = 3
    longest: Sequence[int] = (40, 80, 120, 160)
    samples: int = 1_280_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.longest = list(self.longest)
        if not self.longest or not 1 <= self.shortest <= min(self.longest) or max(self.longest) > self.length:
            raise UserError(
                f"longest: {self.longest} must be numbers from shortest, {self.shortest}, to length, {self.length}"
            )
        if self.samples < 1:
            raise UserError(f"samples: {self.samples} must be at least 1")

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Elements, and their products up to the length of each sample."""
        tokens, labels = super().generate(numbers, vocab_size, seeds)
        stages = np.minimum(numbers // np.uint64(self.samples), len(self.longest) - 1).astype(int)
        choices = np.array(self.longest)[stages] - self.shortest + 1
        ends = self.shortest + (real(numbers, 1, seeds("lengths"))[:, 0] * choices).astype(int)
        labels[np.arange(self.length) >= ends[:, None]] = NO_LOSS
        return tokens, labels
