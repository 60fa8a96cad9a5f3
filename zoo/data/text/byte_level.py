"""A byte-level BPE tokenizer from the lists of a file that is not a `tokenizer.json`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors


def byte_level_bpe(
    vocabulary: Mapping[str, int],
    merges: Iterable[str],
    *,
    steps: Sequence[str | None],
    regex: bool,
    ignore_merges: bool = False,
    special_tokens: Sequence[str] = (),
    added_tokens: Sequence[str] = (),
    bos_token: str | None = None,
) -> tokenizers.Tokenizer:
    """Return a tokenizer of the `tokenizers` library.

    Args:
        vocabulary: Text of bytes as characters → id, with special and added tokens.
        merges: Two pieces each, with a space between them.
        steps: Regular expressions of the pieces that text is divided into, one after another; None is one digit.
        regex: Whether to divide text by the expression of GPT-2 at last.
        ignore_merges: Whether words of the vocabulary are taken without merges.
        special_tokens: Tokens that only code writes into a text.
        added_tokens: Other tokens that are found before text is divided.
        bos_token: The token before each text, if any.
    """
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    made = tokenizers.Tokenizer(models.BPE(dict(vocabulary), pairs, ignore_merges=ignore_merges))
    parts: list[Any] = [
        pre_tokenizers.Digits(individual_digits=True)
        if step is None
        else pre_tokenizers.Split(tokenizers.Regex(step), "isolated")
        for step in steps
    ]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special_tokens))
    made.add_tokens(list(added_tokens))
    if bos_token is not None:
        made.post_processor = processors.TemplateProcessing(
            f"{bos_token} $A", special_tokens=[(bos_token, vocabulary[bos_token])]
        )
    return made
