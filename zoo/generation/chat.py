"""A conversation with a language model."""

from collections.abc import Iterator, Sequence
from typing import Unpack

from zoo.data.text.chat import Chat
from zoo.data.text.tokenizer import Tokenizer
from zoo.generation.generate import Sampling, check_prompt, stop_ids, text_after
from zoo.generation.graphs import DecodingGraphs
from zoo.lm.model import LanguageModel


class Conversation:
    """Replies to one message after another, each with all earlier ones before it.

    Args:
        model: A language model of the zoo.
        tokenizer: Its tokenizer, by whose chat template, or else a default one, messages become text.
        system: The content of a first message with the role "system"; None: without one.
        seed: Reply i is drawn with `seed` + i; None for other samples each time.
        stop: Strings that end the text before them.
        options: As in `generate`.

    Attributes:
        messages: What was said, as mappings with the keys role and content.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        system: str | None = None,
        *,
        seed: int | None = None,
        stop: Sequence[str] = (),
        **options: Unpack[Sampling],
    ) -> None:
        self._model, self._tokenizer, self._chat = model, tokenizer, Chat(tokenizer)
        self._seed, self._stop, self._options = seed, stop, options
        self._options.setdefault("graphs", DecodingGraphs())
        end = self._chat.end_id()
        self._ends = {*stop_ids(tokenizer), *([] if end is None else [end])}
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def reply(self, message: str) -> Iterator[str]:
        """Yield the reply to a message, piece by piece; what was yielded is part of the conversation if it is closed.

        Raises:
            UserError: The message is not valid text, the chat template refuses the conversation, or as `generate`.
        """
        check_prompt(message)
        self.messages.append({"role": "user", "content": message})
        ids, said = self._chat.prompt(self.messages), ""
        seed = None if self._seed is None else self._seed + len(self.messages)
        try:
            for piece in text_after(
                self._model, self._tokenizer, ids, ends=self._ends, seed=seed, stop=self._stop, **self._options
            ):
                said += piece
                yield piece
        finally:
            # templates write the space around a reply
            self.messages.append({"role": "assistant", "content": said.strip()})
