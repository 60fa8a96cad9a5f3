"""A model under evaluation, as tasks see it."""

from collections.abc import Sequence
from typing import Protocol

from zoo.data.text.tokenizer import Tokenizer


class Subject(Protocol):
    """A model under evaluation.

    Attributes:
        vocab_size: Number of tokens.
        tokenizer: Its tokenizer; None if it was trained on tokens.
        context_length: Tokens of a training sequence; None if unknown.
        state_size: Numbers in the state of a sequence; None if unknown.
    """

    vocab_size: int
    tokenizer: Tokenizer | None
    context_length: int | None
    state_size: int | None

    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """The most likely continuation of each prompt, token by token, up to the end of the document (left out)."""
        ...
