"""The tokens of held-out text."""

from collections.abc import Iterator

from zoo.data.text.corpus import Corpus
from zoo.data.text.split import SplitByContent
from zoo.data.text.tokenizer import Tokenizer

HELD_OUT = 0.05  # TextData's default, so that the embedded text is what such a run was not trained on


def held_out_tokens(corpus: Corpus, tokenizer: Tokenizer, fraction: float = HELD_OUT) -> Iterator[int]:
    """Yield the tokens of the validation split of a text, or of all text if its fraction is 1.

    Each document ends by its end token.
    """
    split = SplitByContent(corpus, fraction if fraction < 1 else None)
    for text in corpus.texts():
        for part, held_out in split(text):
            if part == "validation":
                yield from [*([] if tokenizer.bos_id is None else [tokenizer.bos_id]), *tokenizer.encode(held_out)]
                yield tokenizer.eos_id
