"""Multi-query associative recall as the data of a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from kernels.errors import UserError
from zoo.data.loader import ValidationLoader
from zoo.data.resumable import ResumableData, check_minimum
from zoo.data.synthetic.recall import Recall, RecallStream, RecallTask, number_of, shares

Split = Literal["train", "validation", "test"]


class MQAR(ResumableData):
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

    overfit_hint = "set data.train_samples to a small number"

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
        super().__init__(batch_size, num_workers, seed)
        self.tasks = list(tasks)
        self.validation_tasks = self.tasks if validation_tasks is None else list(validation_tasks)
        self.vocab_size, self.random_fillers, self.power = vocab_size, random_fillers, power
        self.train_samples, self.validation_samples = train_samples, validation_samples
        if vocab_size % 2 or vocab_size < 4:
            raise UserError(f"data.vocab_size is {vocab_size}; it must be an even number, at least 4.")
        if power <= 0:
            raise UserError(f"data.power is {power}; it must be above 0.")
        check_minimum(validation_samples=(validation_samples, 1), train_samples=(train_samples, batch_size))
        for name, checked in (("tasks", self.tasks), ("validation_tasks", self.validation_tasks)):
            _check_tasks(name, checked, vocab_size)
        self.sequence_length = max(task.length for task in self.tasks + self.validation_tasks)

    def get_tokenizer(self) -> None:
        """None: there is no text."""

    @property
    def validation_names(self) -> list[str]:
        """Names of the validation tasks, `pairs_8`, or `length_64_pairs_8` if the former is ambiguous."""
        pairs = Counter(task.pairs for task in self.validation_tasks)
        clash = max(pairs.values()) > 1
        return [(f"length_{task.length}_" if clash else "") + f"pairs_{task.pairs}" for task in self.validation_tasks]

    @property
    def train(self) -> RecallStream:
        """The training samples, in order."""
        weights = [task.weight for task in self.tasks]
        sizes = [0] * len(weights) if self.train_samples is None else shares(self.train_samples, weights)
        samples = [self._recall(task, size, "train") for task, size in zip(self.tasks, sizes, strict=True)]
        return RecallStream(samples, weights, self.batch_size, self.train_samples, number_of("order", self.seed))

    def val_dataloader(self) -> list[ValidationLoader]:
        """A loader for each validation task."""
        return self._loaders("validation")

    def test_dataloader(self) -> list[ValidationLoader]:
        """As for validation, but with other samples."""
        return self._loaders("test")

    def predict_dataloader(self) -> list[ValidationLoader]:
        """The validation samples."""
        return self.val_dataloader()

    def _loaders(self, split: Split) -> list[ValidationLoader]:
        samples = [self._recall(task, self.validation_samples, split) for task in self.validation_tasks]
        return [self.evaluation_loader(task_samples) for task_samples in samples]

    def _recall(self, task: RecallTask, size: int, split: Split) -> Recall:
        return Recall(task, size, self.vocab_size, self.random_fillers, self.power, f"{self.seed} {split}")

    def identity(self) -> dict[str, Any]:
        """All that determines which sample is at a position; with several tasks that includes the batch size."""
        identity: dict[str, Any] = {"seed": self.seed, "vocab_size": self.vocab_size}
        identity |= {"tasks": [asdict(task) for task in self.tasks], "train_samples": self.train_samples}
        identity |= {"random_fillers": self.random_fillers, "power": self.power}
        return identity | ({"batch_size": self.batch_size} if len(self.tasks) > 1 else {})


def _check_tasks(name: str, tasks: Sequence[RecallTask], vocab_size: int) -> None:
    if not tasks:
        raise UserError(f"data.{name} is an empty list; give at least one, such as {{length: 64, pairs: 8}}.")
    for number, task in enumerate(tasks):
        key, keys = f"data.{name}[{number}]", vocab_size // 2 - 1
        if task.pairs < 1:
            raise UserError(f"{key}.pairs is {task.pairs}; it must be at least 1.")
        if task.length < 4 * task.pairs:
            raise UserError(f"{key}.length is {task.length}; {task.pairs} pairs need at least {4 * task.pairs} tokens.")
        if task.pairs > keys:
            raise UserError(f"{key}.pairs is {task.pairs}; data.vocab_size {vocab_size} has only {keys} keys.")
        if task.weight <= 0:
            raise UserError(f"{key}.weight is {task.weight}; it must be above 0.")
    sizes = Counter((task.length, task.pairs) for task in tasks)
    if twice := [size for size, number in sizes.items() if number > 1]:
        raise UserError(f"data.{name} lists length {twice[0][0]} with {twice[0][1]} pairs twice; give each size once.")
