"""Tasks made of tokens without text: associative recall.

A model is trained on such tokens first (`configs/recall`), and is then tested on what it has learned, in any size. The
vocabulary of the task is the model's. Samples are of a split of their own, so that none was trained on.
"""

from collections.abc import Callable
from typing import ClassVar

from kernels import UserError
from zoo.data.loader import SampleSet
from zoo.data.synthetic.recall import Recall, RecallTask
from zoo.data.synthetic.task import TokenSamples, TokenTask
from zoo.evaluation.loaded import LoadedModel
from zoo.evaluation.task import Cell, Options, Row, Task, proportion

SAMPLES = 200
SPLIT = "evaluation"
AT_ONCE = 16_384  # tokens of a batch


class TokenEvaluation(Task):
    """The share of labelled tokens that a model says, in each size of a task.

    Attributes:
        data: Makes the data's task from the length of its sequences.
        shortest: The fewest tokens of a sequence.
        default_lengths: Tokens of the sequences, unless the user says otherwise.
    """

    needs = "a model trained on it"
    data: ClassVar[Callable[..., TokenTask]]
    shortest: ClassVar[int]
    default_lengths: ClassVar[tuple[int, ...]]

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        for length in options.lengths or ():
            if length < self.shortest:
                raise UserError(f"lengths: {length} is too short; {self.name} needs at least {self.shortest} tokens")
        self.number = SAMPLES if options.samples is None else options.samples

    def task(self, cell: Cell) -> TokenTask:
        """The data's task of a cell."""
        return type(self).data(cell["length"])

    def misfit(self, cell: Cell, vocab_size: int) -> str | None:
        """Why a vocabulary is too small for a cell, to follow the size of the cell; None if it is not."""
        return self.task(cell).misfit(vocab_size)

    def sizes(self, length: int) -> list[Cell]:
        """The cells of sequences of up to `length` tokens, of which there is at least one."""
        return [{"length": length}]

    def cells(self, subject: LoadedModel) -> list[Cell]:
        """All sizes of the lengths that the user named; of the task's own lengths, those that the vocabulary allows."""
        cells = [cell for length in self.options.lengths or self.default_lengths for cell in self.sizes(length)]
        misfits = [self.misfit(cell, subject.vocab_size) for cell in cells]
        fitting = [cell for cell, misfit in zip(cells, misfits, strict=True) if misfit is None]
        if len(fitting) < len(cells) and (self.options.lengths is not None or not fitting):
            cell, misfit = next((cell, misfit) for cell, misfit in zip(cells, misfits, strict=True) if misfit)
            size = ", ".join(f"{name} {value}" for name, value in cell.items())
            raise UserError(f"{self.name}: {subject.name} has a vocabulary of {subject.vocab_size}; {size} {misfit}")
        return fitting

    def samples(self, cell: Cell, vocab_size: int) -> SampleSet:
        """The samples of a cell."""
        return TokenSamples(self.task(cell), self.number, vocab_size, self.options.seed, SPLIT)

    def run(self, subject: LoadedModel, cell: Cell) -> list[Row]:
        """The accuracy over all labelled tokens of a cell."""
        samples, correct, count = self.samples(cell, subject.vocab_size), 0, 0
        rows = max(1, AT_ONCE // cell["length"])
        for first in range(0, self.number, rows):
            batch = samples.batch(range(first, min(first + rows, self.number)))
            correct += int(subject.label_scores(batch).correct.sum())
            count += int((batch.labels >= 0).sum())
        return [{**cell, "metric": "accuracy", **proportion(correct, count)}]


class PairsEvaluation(TokenEvaluation):
    """Recall of 4, 8, 16 … pairs, up to the number that fits. By default larger lengths have only the largest number.

    Attributes:
        per_pair: Tokens that a pair needs, its question included.
        square: Whether the number of pairs must be a square.
    """

    axis = "pairs"
    default_lengths = (64, 128, 256, 512)
    per_pair: ClassVar[int]
    square: ClassVar[bool] = False

    def task(self, cell: Cell) -> TokenTask:
        """The data's task of a cell."""
        return type(self).data(cell["length"], cell["pairs"])

    def sizes(self, length: int) -> list[Cell]:
        """One for each power of two, or of four."""
        powers = [1 << n for n in range(2, length.bit_length(), 2 if self.square else 1)]
        pairs = [number for number in powers if number * self.per_pair <= length]
        only_largest = self.options.lengths is None and length > self.default_lengths[0]
        return [{"length": length, "pairs": number} for number in (pairs[-1:] if only_largest else pairs)]


class MqarTask(PairsEvaluation):
    """Multi-query associative recall (`zoo.data.MQAR`, arXiv 2312.04927), with random tokens between the questions."""

    name = "mqar"
    measures = "recall of values by their keys, over the number of pairs"
    per_pair, shortest = 4, 16

    def misfit(self, cell: Cell, vocab_size: int) -> str | None:
        """Half of the tokens are keys, half of them values."""
        least = 2 * (cell["pairs"] + 1)
        return f"needs an even number, at least {least}" if vocab_size % 2 or vocab_size < least else None

    def samples(self, cell: Cell, vocab_size: int) -> Recall:
        """As they are trained on."""
        task, key = RecallTask(cell["length"], cell["pairs"]), f"{self.options.seed} {SPLIT}"
        return Recall(task, self.number, vocab_size, True, 0.01, key)


TOKEN_TASKS: tuple[type[Task], ...] = (MqarTask,)
