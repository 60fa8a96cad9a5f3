"""A task made of tokens, and its samples."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from zoo.data.batch import Batch
from zoo.data.synthetic.recall import number_of

Split = Literal["train", "validation", "test"]


class TokenTask(ABC):
    """A task whose samples are tokens and, where there is something to answer, labels. One class is one task.

    The constructor's arguments are the task's keys in a config. Each is kept as an attribute of the same name, since
    samples depend on all of them but `weight`.

    Attributes:
        length: Tokens in a sequence.
        weight: Relative frequency of training batches of this task.
        named_after: The attributes that its name consists of.
    """

    length: int
    weight: float
    named_after: ClassVar[Sequence[str]] = ("length",)

    @property
    def name(self) -> str:
        """Its size, such as `pairs_8`, by which tables tell it from the same task in other sizes."""
        return "_".join(f"{name}_{getattr(self, name)}" for name in self.named_after)

    @abstractmethod
    def misfit(self, vocab_size: int) -> str | None:
        """Why `vocab_size` tokens do not do, to follow "data.vocab_size is 15; "; None if they do."""

    @abstractmethod
    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: "Seeds") -> tuple[np.ndarray, np.ndarray]:
        """The samples with these numbers, `[B]` uint64: `[B, T]` int64 tokens and `[B, T]` int64 labels."""

    def arguments(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}


class Seeds:
    """Seeds of independent streams, by purpose, of a task in a split; `shared` ones are equal in all splits."""

    def __init__(self, task: TokenTask, seed: int, split: str) -> None:
        sizes = {name: value for name, value in task.arguments().items() if name != "weight"}
        self._key, self._split = (type(task).__name__, sizes, seed), split

    def __call__(self, purpose: str) -> int:
        """The seed of the draws for a purpose."""
        return number_of(*self._key, self._split, purpose)

    def shared(self, purpose: str) -> int:
        """The seed of draws that are the same in all splits and sizes, such as facts to learn by heart."""
        return number_of(self._key[0], self._key[2], purpose)


class TokenSamples:
    """Samples of one task; sample i is a function of seed, split and i alone."""

    def __init__(self, task: TokenTask, size: int, vocab_size: int, seed: int, split: str) -> None:
        self.task, self.size, self.vocab_size, self._seeds = task, size, vocab_size, Seeds(task, seed, split)

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int]) -> Batch:
        """The samples with these numbers, `[B, T]`."""
        tokens, labels = self.task.generate(np.array(indices, np.uint64), self.vocab_size, self._seeds)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))
