"""A chat in a terminal."""

import sys
from collections.abc import Callable
from contextlib import closing, suppress

from zoo.generation.chat import Conversation


def talk(conversation: Conversation, message: str, say: Callable[[str], object]) -> list[str]:
    """Read messages, a line each, and write replies until the input ends.

    Ctrl-C ends a reply, which stays in the conversation up to there; where a message is awaited, it ends the chat.

    Args:
        conversation: The conversation.
        message: The first message; if it is empty, it is read as well.
        say: Writes a piece of text.

    Returns:
        The replies.
    """
    with suppress(ImportError):
        import readline  # noqa: F401 (lines can be edited where `input` reads them)
    while True:
        if not message.strip():
            try:
                message = input("> " if sys.stdin.isatty() else "")
            except (EOFError, KeyboardInterrupt):
                return [each["content"] for each in conversation.messages if each["role"] == "assistant"]
            continue
        with suppress(KeyboardInterrupt), closing(conversation.reply(message)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                say(piece)
        say("\n")
        message = ""
