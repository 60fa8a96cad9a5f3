"""Tokenizers made from lists: they divide text by the steps that are named, and find special tokens first."""

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from zoo.saved.gguf.vocabulary import byte_level_bpe

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["11", "ab", "abc"]
VOCABULARY = {token: i for i, token in enumerate([*BYTES, *WORDS, "<s>", "<go>"])}


def made(steps: tuple[str | None, ...] = (), **options: bool | str) -> Tokenizer:
    arguments = {"regex": True, **options}
    return byte_level_bpe(
        VOCABULARY, ["1 1", "a b"], steps=steps, special_tokens=["<s>"], added_tokens=["<go>"], **arguments
    )


@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [
        (made(), ["ab", "c", "11", "1"]),
        (made(steps=(None,)), ["ab", "c", "1", "1", "1"]),
        (made(steps=("b",), regex=False), ["a", "b", "c", "11", "1"]),
        (made(ignore_merges=True), ["abc", "11", "1"]),
        (made(bos_token="<s>"), ["<s>", "ab", "c", "11", "1"]),
    ],
)
def test_steps(tokenizer: Tokenizer, tokens: list[str]):
    assert tokenizer.encode("abc111").tokens == tokens
    assert tokenizer.decode(tokenizer.encode("abc111").ids) == "abc111"


def test_tokens_found_first():
    tokenizer = made()
    assert tokenizer.encode("a<go>b<s>é").tokens == ["a", "<go>", "b", "<s>", "Ã", "©"]
    assert tokenizer.decode(tokenizer.encode("a<go><s>é").ids) == "a<go>é"
    assert tokenizer.token_to_id("<go>") == VOCABULARY["<go>"]
