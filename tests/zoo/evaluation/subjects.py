"""Models that need no training, one that can read and one that cannot, and what a model says of a continuation."""

import random
import re
from collections.abc import Sequence

import torch

from zoo.data import Tokenizer
from zoo.lm import LanguageModel

_VALUE = r"([0-9a-f]{8}-[0-9a-f-]{27}|\d+)"
_KEY = re.compile(r"special magic \w+ for ([a-z]+-[a-z]+)")


class Reader:
    """Finds the needle that a prompt asks for in its text, as an oracle.

    Attributes:
        prompts: All prompts so far.
    """

    name, context_length = "reader", 128

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size if tokenizer else 9
        self.prompts: list[list[int]] = []

    def answer(self, prompt: str) -> str:
        """The value after the key that the prompt mentions last, or else the pass key."""
        keys = _KEY.findall(prompt)
        stated = rf"for {keys[-1]} is:? {_VALUE}" if keys else rf"pass key is {_VALUE}"
        match = re.search(stated, prompt)
        assert match
        return f"Well, it is {match.group(1).upper()}, I think."

    def state_size(self, length: int) -> float:
        """That of a recurrent model."""
        return 4096

    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """The answers."""
        assert self.tokenizer
        self.prompts += [list(prompt) for prompt in prompts]
        answers = [self.tokenizer.encode(self.answer(self.tokenizer.decode(prompt))) for prompt in prompts]
        assert max(map(len, answers)) <= max_new_tokens
        return answers


class NearMiss(Reader):
    """Finds the needle, and reads one character of its value wrong.

    Args:
        character: Which.
    """

    def __init__(self, tokenizer: Tokenizer | None, character: int) -> None:
        super().__init__(tokenizer)
        self.character = character

    def answer(self, prompt: str) -> str:
        """The value of the oracle with one other digit."""
        sentence = super().answer(prompt)
        match = re.search(_VALUE, sentence.lower())
        assert match
        value = list(match.group(1))
        value[self.character] = "7" if value[self.character] != "7" else "8"
        return sentence.lower().replace(match.group(1), "".join(value))


class Guesser(Reader):
    """Says what comes to its mind."""

    def answer(self, prompt: str) -> str:
        """A random number."""
        return str(random.Random(prompt).randrange(10**6, 10**7))


@torch.no_grad()
def direct(model: LanguageModel, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The log-likelihood of a continuation, and whether it is the likeliest, from one call on all tokens."""
    logits, labels = model(torch.tensor([context + continuation]))[0], torch.tensor(continuation)
    actual = logits[0, len(context) - 1 : -1].double().log_softmax(-1)
    return actual.gather(-1, labels[:, None]).sum().item(), bool((actual.argmax(-1) == labels).all())
