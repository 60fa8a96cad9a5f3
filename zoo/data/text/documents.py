"""The kinds of documents of a corpus."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kernels.errors import UserError


@dataclass(frozen=True)
class Tokens:
    """A document as tokens.

    Attributes:
        ids: [n] uint32.
        has_loss: [n] bool, the tokens to train on; None: all.
    """

    ids: np.ndarray
    has_loss: np.ndarray | None = None

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    def content(self) -> bytes:
        """The bytes that identify it."""
        mask = b"" if self.has_loss is None else b"loss" + self.has_loss.tobytes()
        return self.ids.astype("<u4").tobytes() + mask


@dataclass(frozen=True)
class Conversation:
    """Messages, each with a role (system, user, assistant …) and a content. Its text depends on a chat template."""

    messages: tuple[Mapping[str, str], ...]

    @cached_property
    def _json(self) -> str:
        return json.dumps([[each["role"], each["content"]] for each in self.messages], ensure_ascii=False)

    def __len__(self) -> int:
        """Number of characters of its JSON."""
        return len(self._json)

    def content(self) -> bytes:
        """The bytes that identify it."""
        return self._json.encode()

    def texts(self) -> Iterator[str]:
        """Yield the content of each message."""
        return (message["content"] for message in self.messages)


Document = str | Tokens | Conversation


def conversation_of(value: Any, where: str) -> Conversation:
    """The conversation of messages such as [{"role": "user", "content": "Hello"}]; keys with null do not count.

    Raises:
        UserError: It is not one; the message begins with `where`.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f"{where} has no messages; a list of at least one is needed.")
    messages = []
    for number, message in enumerate(value, start=1):
        present = {key: each for key, each in message.items() if each is not None} if isinstance(message, dict) else {}
        if present.keys() != {"role", "content"}:
            names = ", ".join(map(repr, present)) or "none"
            raise UserError(
                f"{where} message {number}, has the keys {names}; role and content are needed, and no others."
            )
        role, content = present["role"], present["content"]
        if not isinstance(role, str) or not role.isidentifier() or not isinstance(content, str):
            raise UserError(f"{where} message {number}, needs a role of one word and a content that is a string.")
        try:
            content.encode()
        except UnicodeEncodeError as error:  # JSON can contain half of a surrogate pair
            raise UserError(f"{where} message {number}, is not valid Unicode ({error.reason}).") from None
        messages.append({"role": role, "content": content})
    return Conversation(tuple(messages))
