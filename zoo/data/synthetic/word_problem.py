"""State tracking: the product of the elements of a group so far, which no sum over tokens gives (arXiv 2404.08819)."""

from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import Literal, get_args

import numpy as np

from kernels.errors import UserError
from mixers.arguments import check_sizes
from zoo.data.order import whole
from zoo.data.synthetic.task import Seeds, TokenTask

Group = Literal["parity", "S3", "A5"]
_ITEMS = {"parity": 2, "S3": 3, "A5": 5}


@cache
def elements(group: Group) -> tuple[tuple[int, ...], ...]:
    """The permutations of a group in lexicographic order, so that the first one is the identity."""
    every = permutations(range(_ITEMS[group]))
    inversions = {p: sum(p[i] > p[j] for j in range(len(p)) for i in range(j)) for p in every}
    return tuple(p for p, count in inversions.items() if group != "A5" or not count % 2)


@cache
def multiplication(group: Group) -> np.ndarray:
    """The table of a group: entry (a, b) is the number of the permutation "b, then a"."""
    number = {p: i for i, p in enumerate(elements(group))}
    return np.array([[number[tuple(a[i] for i in b)] for b in elements(group)] for a in elements(group)])


@dataclass(eq=False, repr=False)
class WordProblem(TokenTask):
    """Random elements of a group, each labelled with the product of all elements up to it.

    Token i is element i of the group: of parity the identity and the exchange of two items, of S3 all 6 permutations of
    three items, of A5 the 60 even permutations of five items. A model has to follow what each permutation does to the
    items. Parity needs a transition with a negative eigenvalue, S3 two reflections per token, and A5 is not solvable.

    Args:
        group: parity, S3 or A5.
        length: Tokens in a sequence.
        weight: Relative frequency of training batches of this task.

    Raises:
        UserError: An argument is out of range.
    """

    group: Group = "parity"
    length: int = 128
    weight: float = 1.0
    named_after = ("length",)

    def __post_init__(self) -> None:
        check_sizes({"length": self.length})
        if self.group not in get_args(Group):
            raise UserError(f"group: {self.group!r} is not one of {', '.join(get_args(Group))}")

    def misfit(self, vocab_size: int) -> str | None:
        """Each element is a token."""
        least = len(elements(self.group))
        return None if vocab_size >= least else f"needs at least {least} for {self.group}"

    def generate(self, numbers: np.ndarray, vocab_size: int, seeds: Seeds) -> tuple[np.ndarray, np.ndarray]:
        """Elements, and their products."""
        table = multiplication(self.group)
        tokens = whole(numbers, self.length, len(table), seeds("elements"))
        labels, product = np.empty_like(tokens), np.zeros(len(numbers), np.int64)
        for t in range(self.length):
            labels[:, t] = product = table[tokens[:, t], product]
        return tokens, labels
