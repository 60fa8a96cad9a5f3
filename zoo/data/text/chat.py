"""Conversations as tokens: a chat template makes the text, and only the template's own special tokens are parsed."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from kernels.errors import UserError
from zoo.data.text.chat_template import DEFAULT_TEMPLATE, Message, render
from zoo.data.text.documents import Conversation, Tokens
from zoo.data.text.tokenizer import Tokenizer

# A noncharacter, which no text has. In the content of messages it breaks what spells a special token.
_BREAK = "\ufdd0"


class Chat:
    """Turns conversations into tokens of a tokenizer, by its chat template or else a default one.

    Args:
        tokenizer: The tokenizer.
        name: The template's name in error messages.

    Raises:
        UserError: The template cannot be used.
    """

    def __init__(self, tokenizer: Tokenizer, name: str = "the chat template") -> None:
        self._tokenizer, self._name = tokenizer, name
        self._template = tokenizer.chat_template or DEFAULT_TEMPLATE
        named = {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id}
        self._tokens = {key: "" if number is None else tokenizer.decode([number]) for key, number in named.items()}
        special = "|".join(map(re.escape, sorted(tokenizer.special_tokens, key=len, reverse=True)))
        self._special = re.compile(f"({special})" if special else r"(?!)()")
        self._spelt = re.compile(f"(?=({special}))" if special else r"(?!)")

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to where the assistant's reply begins."""
        return self._encode(self._text(messages, reply=True))

    def end_id(self) -> int | None:
        """The special token that ends a reply; None if the template has none there."""
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        prompt, text = self._text(messages[:1], reply=True), self._text(messages)
        ends = self._special.findall(text[len(prompt) :] if text.startswith(prompt) else text)
        return self._encode(ends[-1])[0] if ends else None

    def encode(self, conversation: Conversation) -> Tokens:
        """The tokens of a conversation, with loss on the assistant's replies and on the tokens that end them.

        Raises:
            UserError: The template fails, or changes earlier messages when later ones are added, so that it does not
                say where a reply begins.
        """
        messages, text = conversation.messages, self._text(conversation.messages)
        bounds = [0]  # of texts without and with loss in turns
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._text(messages[:number], reply=True), self._text(messages[: number + 1])
            if not (text.startswith(after) and after.startswith(before)) or len(before) < bounds[-1]:
                raise UserError(
                    f"{self._name} changes the messages before message {number + 1} when it is added, so that its "
                    "beginning is unknown; set data.chat_template to one that does not."
                )
            ends = [match.end() for match in self._special.finditer(after, len(before))]
            bounds += [len(before), ends[-1] if ends else len(after)]
        parts = [self._encode(text[start:end]) for start, end in pairwise([*bounds, len(text)])]
        mask = [np.full(len(part), number % 2 == 1) for number, part in enumerate(parts)]
        return Tokens(np.array([token for part in parts for token in part], np.uint32), np.concatenate(mask))

    def _text(self, messages: Sequence[Message], reply: bool = False) -> str:
        broken = [{**message, "content": self._broken(message["content"])} for message in messages]
        return render(self._template, broken, self._tokens, reply, self._name)

    def _broken(self, content: str) -> str:
        """A content with a break behind the first character of all that spells a special token."""
        if _BREAK in content:
            raise UserError("a message has the character U+FDD0, which is not text.")
        starts = [match.start() + 1 for match in self._spelt.finditer(content)]
        return _BREAK.join(content[start:end] for start, end in pairwise([0, *starts, len(content)]))

    def _encode(self, text: str) -> list[int]:
        return [token for part, parsed in self._parts(text) for token in self._tokenizer.encode(part, parsed)]

    def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
        """The parts of a text, and whether special tokens are parsed in them."""
        if _BREAK not in text:
            yield text, True
            return
        for part in self._special.split(text):
            if part:
                yield part.replace(_BREAK, ""), _BREAK not in part
