"""The tokenizer of a public folder as one of ours, and back."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from kernels import UserError
from zoo.conversion.folder import CONFIG, read_config, tokenizer_file
from zoo.data.text.foreign_tokenizer import told
from zoo.data.text.tokenizer import END_TOKENS, Tokenizer, foreign

DESCRIPTION = "tokenizer_config.json"


def read_tokenizer(folder: Path, trust: bool = False) -> Tokenizer | None:
    """The tokenizer of a public folder; None if it has no `tokenizer.json`.

    The token that ends documents is the one that `tokenizer_config.json`, or else config.json, calls `eos`. Documents
    start with a token if the tokenizer puts one before each text by itself. Unless trusted, one that may take much time
    or memory is refused.

    Raises:
        UserError: The file is damaged, or says nowhere which token ends a document.
    """
    if (file := tokenizer_file(folder)) is None:
        return None
    name = f"checkpoint: {file}"
    try:
        text = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{name} cannot be read as text ({error}).") from None
    found = foreign(text, name, trust)
    with told(name):
        found.no_truncation()
        found.no_padding()
        alone = found.encode("").ids
    first = found.id_to_token(alone[0]) if alone else None
    end = _named_end(folder, found)
    if end is None and not any(found.token_to_id(token) is not None for token in END_TOKENS):
        raise UserError(
            f"checkpoint: {folder} does not say which token ends a document; name it as eos_token in {DESCRIPTION}."
        )
    return Tokenizer(found, f"checkpoint: {file}", eos_token=end, bos_token=None if first == end else first)


def _named_end(folder: Path, found: tokenizers.Tokenizer) -> str | None:
    """What the folder's configs call the end of a document, if the tokenizer has it."""
    if (folder / DESCRIPTION).is_file():
        named: Any = read_config(folder, DESCRIPTION).get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        if isinstance(named, str) and found.token_to_id(named) is not None:
            return named
    number: Any = read_config(folder, CONFIG).get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    return found.id_to_token(number) if isinstance(number, int) and number >= 0 else None


def described(tokenizer: Tokenizer) -> dict[str, str]:
    """The files that transformers reads a tokenizer from: name → content."""
    names = {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id}
    tokens = {key: tokenizer.decode([number]) for key, number in names.items() if number is not None}
    description = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **tokens}
    return {"tokenizer.json": tokenizer.to_json(), DESCRIPTION: json.dumps(description, indent=2, ensure_ascii=False)}
