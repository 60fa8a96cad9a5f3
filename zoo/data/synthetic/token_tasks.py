"""Tasks made of tokens alone, each a class, as the data of a run."""

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.errors import UserError
from zoo.data.batch import Batch
from zoo.data.synthetic.recall import number_of
from zoo.data.synthetic.task_data import Split, TaskData


class TokenTask(ABC):
    """A task whose samples are tokens and, where there is something to answer, labels. One class is one task.

    The constructor's arguments are the task's keys in a config. Each is kept as an attribute of the same name, since
    samples depend on all of them but `weight`.

    Attributes:
        length: Tokens in a sequence.
        weight: Relative frequency of training batches of this task.
    """

    length: int
    weight: float

    @property
    @abstractmethod
    def name(self) -> str:
        """Its size, such as `pairs_8`, by which tables tell it from the same task in other sizes."""

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


@dataclass(eq=False, repr=False)
class TokenTasks(TaskData[TokenTask]):
    """One or more tasks made of tokens, generated during training, with the accuracy of each validation task.

    `tasks: [{class_path: SelectiveCopy, init_args: {length: 256}}]`, with any `TokenTask` of this package or your own.
    Any batch can be generated directly, so a run can be resumed at any step with any number of devices.

    The other arguments are those of `TaskData`.

    Args:
        tasks: The training tasks. Each batch is of one task.
        vocab_size: Number of tokens; what they mean is said by each task.

    Raises:
        UserError: An argument is out of range, or a checkpoint is of other data.
    """

    example = "{class_path: InContextRecall}"

    tasks: Sequence[TokenTask]
    vocab_size: int = 16
    validation_tasks: Sequence[TokenTask] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if twice := [name for name, number in Counter(self.validation_names).items() if number > 1]:
            raise UserError(f"data.validation_tasks lists {twice[0]} twice; give each size of a task once.")

    @property
    def validation_names(self) -> list[str]:
        """Names of the validation tasks, `pairs_8`, or `ForgettingRecall_pairs_8` with tasks of several classes."""
        several = len({type(task) for task in self._validated}) > 1
        return [(f"{type(task).__name__}_" if several else "") + task.name for task in self._validated]

    def check(self, key: str, task: TokenTask) -> None:
        """Refuse a vocabulary that does not fit the task."""
        if (misfit := task.misfit(self.vocab_size)) is not None:
            raise UserError(f"data.vocab_size is {self.vocab_size}; {key} {misfit}.")

    def samples(self, task: TokenTask, size: int, split: Split) -> TokenSamples:
        """The samples of one task."""
        return TokenSamples(task, size, self.vocab_size, self.seed, split)

    def described(self) -> list[dict[str, Any]]:
        """The training tasks as plain containers."""
        return [{"task": type(task).__name__, **task.arguments()} for task in self.tasks]
