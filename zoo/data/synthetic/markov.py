"""Random sequences of a Markov chain of tokens, generated during training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.errors import UserError
from zoo.data.batch import Batch
from zoo.data.loader import ValidationLoader
from zoo.data.order import random_bits, shuffled
from zoo.data.resumable import ResumableData, check_minimum
from zoo.data.synthetic.recall import PASS, number_of


class Chain:
    """Samples of the chain; sample i is a function of seed, split and i alone.

    The tokens are arranged in a circle, in random order. The next token is one of a few random distances further on,
    all equally likely; so a sequence is a cumulative sum of random distances, computed in one pass.
    """

    def __init__(self, data: "MarkovChain", size: int, split: str) -> None:
        vocab_size, seed = data.vocab_size, data.seed
        self.length, self.size = data.sequence_length, size
        self._circle = shuffled(np.arange(vocab_size), vocab_size, number_of("circle", seed))
        self._distances = shuffled(np.arange(data.successors), vocab_size, number_of("distances", seed))
        self._seed = number_of("draws", seed, split)

    def __len__(self) -> int:
        return self.size

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        return positions

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples with these numbers, `[B, T]`."""
        draws = random_bits(np.array(indices, np.uint64), self.length + 1, self._seed)
        places = self._distances[draws % np.uint64(len(self._distances))]
        places[:, 0] = draws[:, 0] % np.uint64(len(self._circle))  # any token may be the first
        tokens = torch.from_numpy(self._circle[places.cumsum(1) % len(self._circle)])
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


@dataclass(eq=False, repr=False)
class MarkovChain(ResumableData):
    """Sequences of a random Markov chain, for measurements: any vocabulary and length, without text or tokenizer.

    Each token is followed by one of `successors` others with equal probability. So the loss starts at the logarithm of
    the vocabulary size and falls towards that of `successors`, which a bigram model reaches. Any batch can be generated
    directly, so a run can be resumed at any step with any number of devices.

    Args:
        vocab_size: Number of tokens.
        sequence_length: Tokens in a sequence.
        batch_size: Sequences in a batch, over all devices; a multiple of the number of devices.
        successors: Number of tokens that may follow each token; at most `vocab_size`.
        validation_samples: Sequences in a validation.
        num_workers: Worker processes per device that prefetch batches; 0: none.
        seed: Seed of the chain and of all samples.

    Raises:
        UserError: An argument is out of range, or a checkpoint is of other data.
    """

    overfit_hint = "use data that is not endless, such as MQAR with data.train_samples"

    vocab_size: int = 1024
    sequence_length: int = 1024
    batch_size: int = 8
    successors: int = 4
    validation_samples: int = 64
    num_workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.batch_size, self.num_workers, self.seed)
        check_minimum(
            sequence_length=(self.sequence_length, 1),
            successors=(self.successors, 1),
            validation_samples=(self.validation_samples, 1),
        )
        if self.successors > self.vocab_size:
            raise UserError(f"data.successors is {self.successors}; data.vocab_size has only {self.vocab_size} tokens.")

    def bigram_loss(self) -> float:
        """The entropy of the chain in nats per token, which no model can go below."""
        return math.log(self.successors)

    @property
    def train(self) -> Chain:
        return Chain(self, PASS, "train")

    def val_dataloader(self) -> ValidationLoader:
        """Other samples of the same chain."""
        return self.evaluation_loader(Chain(self, self.validation_samples, "validation"))

    def test_dataloader(self) -> ValidationLoader:
        """Further samples of the same chain."""
        return self.evaluation_loader(Chain(self, self.validation_samples, "test"))

    def identity(self) -> dict[str, Any]:
        """All that determines which sample is at a position."""
        names = ("seed", "vocab_size", "sequence_length", "successors")
        return {name: getattr(self, name) for name in names}
