"""The UTF-8 bytes of each token, by which losses of different tokenizers can be compared."""

import json
import re

import numpy as np
import tokenizers

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of tokenizers with byte fallback


def token_bytes(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """Return the bytes of each token's text, int64 `[vocab_size]`; special tokens, and ids of no token, have none.

    Tokens of a byte-level vocabulary may be parts of a character. Where a decoder removes the space that a tokenizer
    puts before a text, the first token of each document counts one byte too many.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    byte_level = "ByteLevel" in json.dumps(json.loads(tokenizer.to_str())["decoder"])
    sizes = np.zeros(max(vocabulary.values()) + 1, np.int64)
    first = min(vocabulary.values())  # decoded before each token, since decoders treat the start of a text differently
    before = len(tokenizer.decode([first], skip_special_tokens=False).encode())
    for token, number in vocabulary.items():
        if number in added:
            sizes[number] = 0 if added[number].special else len(token.encode())
        elif byte_level:
            sizes[number] = len(token)  # a character for each byte
        elif _BYTE.fullmatch(token):
            sizes[number] = 1
        else:
            sizes[number] = len(tokenizer.decode([first, number], skip_special_tokens=False).encode()) - before
    return sizes
