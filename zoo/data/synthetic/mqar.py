"""Multi-query associative recall as the data of a run."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kernels.errors import UserError
from zoo.data.synthetic.recall import Recall, RecallTask
from zoo.data.synthetic.task import Split
from zoo.data.synthetic.token_tasks import TokenTasks


@dataclass(eq=False, repr=False)
class MQAR(TokenTasks):
    """Multi-query associative recall, generated during training, with the accuracy of each validation task.

    The other arguments are those of `TokenTasks`.

    Args:
        vocab_size: Number of tokens, which must be even: 0, then keys, and in the upper half values.
        tasks: The training tasks: sizes and weights. Each batch is of one task.
        random_fillers: Whether the tokens between the queries are random; otherwise they are 0.
        power: Exponent of the distances, above 0; small values favour queries soon after the pairs, 1 is neutral.

    Raises:
        UserError: An argument is out of range, or a checkpoint is of other data.
    """

    example = "{length: 64, pairs: 8}"

    tasks: Sequence[RecallTask] = (RecallTask(),)  # type: ignore[assignment]
    vocab_size: int = 512
    validation_tasks: Sequence[RecallTask] | None = None  # type: ignore[assignment]
    random_fillers: bool = True
    power: float = 0.01

    def __post_init__(self) -> None:
        if self.vocab_size % 2 or self.vocab_size < 4:
            raise UserError(f"data.vocab_size is {self.vocab_size}; it must be an even number, at least 4.")
        if self.power <= 0:
            raise UserError(f"data.power is {self.power}; it must be above 0.")
        for name, tasks in (("tasks", self.tasks), ("validation_tasks", self.validation_tasks or ())):
            sizes = Counter((task.length, task.pairs) for task in tasks)
            if twice := [size for size, number in sizes.items() if number > 1]:
                size = f"length {twice[0][0]} with {twice[0][1]} pairs"
                raise UserError(f"data.{name} lists {size} twice; give each size once.")
        super().__post_init__()

    @property
    def validation_names(self) -> list[str]:
        """Names of the validation tasks, `pairs_8`, or `length_64_pairs_8` if the former is ambiguous."""
        pairs = Counter(task.pairs for task in self._validated)
        clash = max(pairs.values()) > 1
        return [(f"length_{task.length}_" if clash else "") + f"pairs_{task.pairs}" for task in self._validated]

    def check(self, key: str, task: Any) -> None:
        """Refuse pairs that do not fit the length or the vocabulary."""
        keys = self.vocab_size // 2 - 1
        if task.pairs < 1:
            raise UserError(f"{key}.pairs is {task.pairs}; it must be at least 1.")
        if task.length < 4 * task.pairs:
            raise UserError(f"{key}.length is {task.length}; {task.pairs} pairs need at least {4 * task.pairs} tokens.")
        if task.pairs > keys:
            raise UserError(f"{key}.pairs is {task.pairs}; data.vocab_size {self.vocab_size} has only {keys} keys.")

    def samples(self, task: Any, size: int, split: Split) -> Recall:
        """The samples of one task."""
        return Recall(task, size, self.vocab_size, self.random_fillers, self.power, f"{self.seed} {split}")

    def described(self) -> list[dict[str, Any]]:
        """The training tasks as plain containers."""
        return [asdict(task) for task in self.tasks]

    def identity(self) -> dict[str, Any]:
        """All that determines which sample is at a position; with several tasks that includes the batch size."""
        return super().identity() | {"random_fillers": self.random_fillers, "power": self.power}
