"""ListOps: nested lists of digits to be evaluated, generated during training."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from kernels.errors import UserError
from zoo.data.batch import Batch
from zoo.data.loader import ValidationLoader
from zoo.data.order import shuffled
from zoo.data.resumable import ResumableData, check_minimum
from zoo.data.synthetic.recall import PASS, number_of

_NESTED = 0.25  # chance that an argument is a list and no digit, as published
_TRIES = 10_000  # lists that are drawn for one of a wanted length; one in three has a published one

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(median(values)),
    "[SM": lambda values: sum(values) % 10,
}
WORDS = (*map(str, range(10)), *OPERATORS, "]")  # by token


class Expressions:
    """Samples of one split; sample i is a function of seed, split, sizes and i alone.

    As in Long Range Arena (arXiv 2011.04006): a list has an operator and 2 to `max_args` arguments, each a list with
    probability 1/4 above `max_depth` and else a digit. Lists of other lengths than wanted are drawn again.
    """

    def __init__(self, data: "ListOps", size: int | None, split: str) -> None:
        self.lengths, self.max_depth, self.max_args = (data.min_length, data.max_length), data.max_depth, data.max_args
        self.size, self._key = size, (data.seed, split, *self.lengths, data.max_depth, data.max_args)

    def __len__(self) -> int:
        return self.size or PASS

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        """A permutation of a fixed number of samples for each pass; otherwise the positions: no sample is repeated."""
        return positions if self.size is None else shuffled(positions, self.size, seed)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples with these numbers, packed into one row, and the value of each `[1, N]`."""
        samples = [self.sample(index) for index in indices]
        bounds = np.cumsum([0, *(len(tokens) for tokens, _ in samples)])
        return Batch(
            torch.tensor([[token for tokens, _ in samples for token in tokens]]),
            torch.tensor([[value for _, value in samples]]),
            torch.from_numpy(bounds.astype(np.int32)),
        )

    def sample(self, index: int) -> tuple[list[int], int]:
        """The tokens and the value of a sample.

        Raises:
            UserError: Lists of these sizes hardly ever have the wanted length.
        """
        draw = random.Random(number_of("listops", index, *self._key)).random  # the same in every version of Python
        shortest, longest = self.lengths
        for _ in range(_TRIES):
            tokens: list[int] = []
            value = self._list(tokens, 1, draw)
            if value is not None and len(tokens) >= shortest:
                return tokens, value
        raise UserError(
            f"data.min_length is {shortest} and data.max_length {longest}; lists of at most {self.max_args} arguments "
            f"and data.max_depth {self.max_depth} are hardly ever of such a length."
        )

    def _list(self, tokens: list[int], depth: int, draw: Callable[[], float]) -> int | None:
        """Append a list to the tokens; returns its value, or None where it gets too long."""
        operator = int(draw() * len(OPERATORS))
        tokens.append(10 + operator)
        values = []
        for _ in range(2 + int(draw() * (self.max_args - 1))):
            if depth + 1 < self.max_depth and draw() < _NESTED:
                value = self._list(tokens, depth + 1, draw)
            else:
                tokens.append(value := int(draw() * 10))
            if value is None or len(tokens) >= self.lengths[1]:
                return None
            values.append(value)
        tokens.append(len(WORDS) - 1)
        return [*OPERATORS.values()][operator](values)


@dataclass(eq=False, repr=False)
class ListOps(ResumableData):
    """The values, 0 to 9, of nested lists such as [MAX 2 9 [MIN 4 7 ] 0 ]: ListOps of Long Range Arena (2011.04006).

    Operators are minimum, maximum, median (rounded down) and sum modulo 10. A batch is one row of lists (`cu_seqlens`)
    with one label for each, so the model needs a head that classifies sequences. It reads no files, and any batch can
    be generated directly, so a run can be resumed at any step with any number of devices.

    Args:
        min_length: Tokens in the shortest list.
        max_length: Tokens in the longest list.
        max_depth: Levels of the longest path from the outer list to a digit; at least 2.
        max_args: Arguments of an operator, at most; at least 2.
        batch_size: Lists in a batch, over all devices; a multiple of the number of devices.
        train_samples: Number of distinct lists, reshuffled for each pass. Null: no list is repeated.
        validation_samples: Lists in a validation, and in a test.
        num_workers: Worker processes per device that prefetch batches; 0: none.
        seed: Seed of all samples and their order.

    Raises:
        UserError: An argument is out of range, or a checkpoint is of other data.
    """

    overfit_hint = "set data.train_samples to a small number"
    vocab_size = len(WORDS)
    num_classes = 10

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_args: int = 10
    batch_size: int = 32
    train_samples: int | None = 96_000
    validation_samples: int = 2000
    num_workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.batch_size, self.num_workers, self.seed)
        check_minimum(
            min_length=(self.min_length, 4),  # an operator, two digits and a bracket
            max_length=(self.max_length, self.min_length),
            max_depth=(self.max_depth, 2),
            max_args=(self.max_args, 2),
            train_samples=(self.train_samples, self.batch_size),
            validation_samples=(self.validation_samples, 1),
        )
        self.sequence_length = self.max_length
        self.train.sample(0)  # refuses lengths that do not occur

    @property
    def train(self) -> Expressions:
        return Expressions(self, self.train_samples, "train")

    def val_dataloader(self) -> ValidationLoader:
        """Other lists of the same kind."""
        return self.evaluation_loader(Expressions(self, self.validation_samples, "validation"))

    def test_dataloader(self) -> ValidationLoader:
        """Further lists of the same kind."""
        return self.evaluation_loader(Expressions(self, self.validation_samples, "test"))

    def identity(self) -> dict[str, Any]:
        """All that determines which sample is at a position."""
        names = ("seed", "min_length", "max_length", "max_depth", "max_args", "train_samples")
        return {name: getattr(self, name) for name in names}
