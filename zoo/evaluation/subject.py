"""The model under evaluation, as tasks see it. Tests put oracles in its place."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from zoo.data.batch import Batch
from zoo.data.text.tokenizer import Tokenizer


class Scored(NamedTuple):
    """A continuation's log-likelihood in nats, and whether greedy decoding would have produced it."""

    log_likelihood: float
    greedy: bool


class TokenScores(NamedTuple):
    """Negative log-likelihood of each label in nats, [B,T] fp32, and whether it is the likeliest token, [B,T].

    Without a label they are 0 and false.
    """

    losses: Tensor
    correct: Tensor


class Subject(Protocol):
    """A model under evaluation.

    Attributes:
        name: As in tables.
        tokenizer: None if it was trained without text.
        context_length: The length of its training sequences; None if unknown.
    """

    name: str
    tokenizer: Tokenizer | None
    context_length: int | None

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """The likeliest next tokens after each prompt, up to the end of the document."""
        ...

    def log_likelihoods(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
        """Return the log likelihood of each continuation, given its context of at least one token."""
        ...

    def label_scores(self, batch: Batch) -> TokenScores:
        """The loss of each label of a batch."""
        ...

    def state_size(self, length: int) -> float:
        """Elements of its state after `length` tokens of one sequence."""
        ...
