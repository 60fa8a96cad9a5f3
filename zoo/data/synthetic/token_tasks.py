"""Tasks made of tokens alone (`task.py`), as the data of a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kernels.errors import UserError
from zoo.data.loader import SampleSet, ValidationLoader
from zoo.data.resumable import ResumableData, check_minimum
from zoo.data.synthetic.recall import RecallStream, number_of, shares
from zoo.data.synthetic.task import Split, TokenSamples, TokenTask


@dataclass(eq=False, repr=False)
class TokenTasks(ResumableData):
    """One or more tasks made of tokens, generated during training, with the accuracy of each validation task.

    `tasks: [{class_path: WordProblem, init_args: {group: S3}}]`, with any `TokenTask` of this package or your own.
    It has no tokenizer and reads no files. Any batch can be generated directly, so a run can be resumed at any step
    with any number of devices.

    Args:
        tasks: The training tasks. Each batch is of one task.
        vocab_size: Number of tokens; what they mean is said by each task.
        validation_tasks: The validation tasks; null: the training tasks.
        batch_size: Sequences in a batch, over all devices; a multiple of the number of devices.
        train_samples: Number of distinct samples, divided among the tasks by weight and reshuffled for each pass.
            Null: no sample is repeated.
        validation_samples: Samples per validation task.
        num_workers: Worker processes per device that prefetch batches; 0: none.
        seed: Seed of all samples and their order.

    Raises:
        UserError: An argument is out of range, or a checkpoint is of other data.
    """

    overfit_hint = "set data.train_samples to a small number"
    example: ClassVar[str] = "{class_path: WordProblem}"  # a task in the notation of a config

    tasks: Sequence[TokenTask]
    vocab_size: int = 16
    validation_tasks: Sequence[TokenTask] | None = None
    batch_size: int = 32
    train_samples: int | None = None
    validation_samples: int = 1000
    num_workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.batch_size, self.num_workers, self.seed)
        self.tasks = list(self.tasks)
        self._validated: list[Any] = list(self.tasks if self.validation_tasks is None else self.validation_tasks)
        self.validation_tasks = self._validated
        samples, train_samples = (self.validation_samples, 1), (self.train_samples, self.batch_size)
        check_minimum(validation_samples=samples, train_samples=train_samples)
        for name, checked in (("tasks", self.tasks), ("validation_tasks", self._validated)):
            if not checked:
                raise UserError(f"data.{name} is an empty list; give at least one, such as {self.example}.")
            for number, task in enumerate(checked):
                self.check(f"data.{name}[{number}]", task)
                if task.weight <= 0:
                    raise UserError(f"data.{name}[{number}].weight is {task.weight}; it must be above 0.")
        if twice := [name for name, number in Counter(self.validation_names).items() if number > 1]:
            raise UserError(f"data.validation_tasks lists {twice[0]} twice; give each size of a task once.")
        self.sequence_length = max(task.length for task in (*self.tasks, *self._validated))

    @property
    def validation_names(self) -> list[str]:
        """Names of the validation tasks, `pairs_8`, or `MyTask_pairs_8` with tasks of several classes."""
        several = len({type(task) for task in self._validated}) > 1
        return [(f"{type(task).__name__}_" if several else "") + task.name for task in self._validated]

    def check(self, key: str, task: Any) -> None:
        """Raise a UserError that names the `key` of a task if it is impossible, as with too small a vocabulary."""
        if (misfit := task.misfit(self.vocab_size)) is not None:
            raise UserError(f"data.vocab_size is {self.vocab_size}; {key} {misfit}.")

    def samples(self, task: Any, size: int, split: Split) -> SampleSet:
        """The samples of one task; sample i is a function of the seed, the split and i alone."""
        return TokenSamples(task, size, self.vocab_size, self.seed, split)

    def described(self) -> list[dict[str, Any]]:
        """The training tasks as plain containers."""
        return [{"task": type(task).__name__, **task.arguments()} for task in self.tasks]

    @property
    def train(self) -> RecallStream:
        """The training samples, in order."""
        weights = [task.weight for task in self.tasks]
        sizes = [0] * len(weights) if self.train_samples is None else shares(self.train_samples, weights)
        samples = [self.samples(task, size, "train") for task, size in zip(self.tasks, sizes, strict=True)]
        return RecallStream(samples, weights, self.batch_size, self.train_samples, number_of("order", self.seed))

    def val_dataloader(self) -> list[ValidationLoader]:
        """A loader for each validation task."""
        return self._loaders("validation")

    def test_dataloader(self) -> list[ValidationLoader]:
        """As for validation, but with other samples."""
        return self._loaders("test")

    def _loaders(self, split: Split) -> list[ValidationLoader]:
        samples = [self.samples(task, self.validation_samples, split) for task in self._validated]
        return [self.evaluation_loader(task_samples) for task_samples in samples]

    def identity(self) -> dict[str, Any]:
        """All that determines which sample is at a position; with several tasks that includes the batch size."""
        identity: dict[str, Any] = {"seed": self.seed, "vocab_size": self.vocab_size, "tasks": self.described()}
        identity["train_samples"] = self.train_samples
        return identity | ({"batch_size": self.batch_size} if len(self.tasks) > 1 else {})
