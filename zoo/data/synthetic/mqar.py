"""Multi-query associative recall as the data of a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kernels.errors import UserError
from zoo.data.synthetic.recall import Recall, RecallTask
from zoo.data.synthetic.task_data import Split, TaskData


class MQAR(TaskData[RecallTask]):
    """Multi-query associative recall, generated during training, with the accuracy of each validation task.

    It has no tokenizer and reads no files. Any batch can be generated directly, so a run can be resumed at any step
    with any number of devices.

    Args:
        vocab_size: Number of tokens, which must be even: 0, then keys, and in the upper half values.
        tasks: The training tasks: sizes and weights. Each batch is of one task.
        validation_tasks: The validation tasks; null: the training tasks.
        batch_size: Sequences in a batch, over all devices; a multiple of the number of devices.
        train_samples: Number of distinct samples, divided among the tasks by weight and reshuffled for each pass.
            Null: no sample is repeated.
        validation_samples: Samples per validation task.
        random_fillers: Whether the tokens between the queries are random; otherwise they are 0.
        power: Exponent of the distances, above 0; small values favour queries soon after the pairs, 1 is neutral.
        num_workers: Worker processes per device that prefetch batches; 0: none.
        seed: Seed of all samples and their order.

    Raises:
        UserError: An argument is out of range, or a checkpoint is of other data.
    """

    example = "{length: 64, pairs: 8}"

    def __init__(
        self,
        vocab_size: int = 512,
        tasks: Sequence[RecallTask] = (RecallTask(),),
        validation_tasks: Sequence[RecallTask] | None = None,
        batch_size: int = 32,
        train_samples: int | None = None,
        validation_samples: int = 1000,
        random_fillers: bool = True,
        power: float = 0.01,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        if vocab_size % 2 or vocab_size < 4:
            raise UserError(f"data.vocab_size is {vocab_size}; it must be an even number, at least 4.")
        if power <= 0:
            raise UserError(f"data.power is {power}; it must be above 0.")
        self.random_fillers, self.power = random_fillers, power
        super().__init__(
            vocab_size, tasks, validation_tasks, batch_size, train_samples, validation_samples, num_workers, seed
        )
        _check_sizes("tasks", self.tasks)
        _check_sizes("validation_tasks", self.validation_tasks)

    @property
    def validation_names(self) -> list[str]:
        """Names of the validation tasks, `pairs_8`, or `length_64_pairs_8` if the former is ambiguous."""
        pairs = Counter(task.pairs for task in self.validation_tasks)
        clash = max(pairs.values()) > 1
        return [(f"length_{task.length}_" if clash else "") + f"pairs_{task.pairs}" for task in self.validation_tasks]

    def check(self, key: str, task: RecallTask) -> None:
        """Refuse pairs that do not fit the length or the vocabulary."""
        keys = self.vocab_size // 2 - 1
        if task.pairs < 1:
            raise UserError(f"{key}.pairs is {task.pairs}; it must be at least 1.")
        if task.length < 4 * task.pairs:
            raise UserError(f"{key}.length is {task.length}; {task.pairs} pairs need at least {4 * task.pairs} tokens.")
        if task.pairs > keys:
            raise UserError(f"{key}.pairs is {task.pairs}; data.vocab_size {self.vocab_size} has only {keys} keys.")

    def samples(self, task: RecallTask, size: int, split: Split) -> Recall:
        """The samples of one task."""
        return Recall(task, size, self.vocab_size, self.random_fillers, self.power, f"{self.seed} {split}")

    def described(self) -> list[dict[str, Any]]:
        """The training tasks as plain containers."""
        return [asdict(task) for task in self.tasks]

    def identity(self) -> dict[str, Any]:
        """All that determines which sample is at a position; with several tasks that includes the batch size."""
        return super().identity() | {"random_fillers": self.random_fillers, "power": self.power}


def _check_sizes(name: str, tasks: Sequence[RecallTask]) -> None:
    sizes = Counter((task.length, task.pairs) for task in tasks)
    if twice := [size for size, number in sizes.items() if number > 1]:
        raise UserError(f"data.{name} lists length {twice[0][0]} with {twice[0][1]} pairs twice; give each size once.")
