"""The base class of data modules whose samples belong to tasks, mixed by weight and validated one by one."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from kernels.errors import UserError
from zoo.data.loader import SampleSet, ValidationLoader
from zoo.data.resumable import ResumableData, check_minimum
from zoo.data.synthetic.recall import RecallStream, number_of, shares

Split = Literal["train", "validation", "test"]


class Sized(Protocol):
    """Settings of all tasks: the tokens of a sequence, and the relative frequency of training batches of this task."""

    @property
    def length(self) -> int: ...

    @property
    def weight(self) -> float: ...


T = TypeVar("T", bound=Sized)


@dataclass(eq=False, repr=False)
class TaskData(ResumableData, Generic[T]):
    """Samples that are generated during training, each batch from one task.

    It has no tokenizer and reads no files. Any batch can be generated directly, so a run can be resumed at any step
    with any number of devices.

    Args:
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

    tasks: Sequence[T]
    vocab_size: int
    validation_tasks: Sequence[T] | None = None
    batch_size: int = 32
    train_samples: int | None = None
    validation_samples: int = 1000
    num_workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__(self.batch_size, self.num_workers, self.seed)
        self.tasks = list(self.tasks)
        self._validated = self.tasks if self.validation_tasks is None else list(self.validation_tasks)
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
        self.sequence_length = max(task.length for task in (*self.tasks, *self._validated))

    example: ClassVar[str]  # a task in the notation of a config

    @abstractmethod
    def check(self, key: str, task: T) -> None:
        """Raise a UserError that begins with `key` if a task is impossible."""

    @abstractmethod
    def samples(self, task: T, size: int, split: Split) -> SampleSet:
        """The samples of one task; sample i is a function of the seed, the split and i alone."""

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

    @abstractmethod
    def described(self) -> list[dict[str, Any]]:
        """The training tasks as plain containers."""
