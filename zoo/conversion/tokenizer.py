"""Conversion of the tokenizer of a public folder to ours, and back."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from kernels import UserError
from zoo.conversion.folder import CONFIG, read_config, tokenizer_file
from zoo.data.text.foreign_tokenizer import library_errors
from zoo.data.text.tokenizer import END_TOKENS, Tokenizer, foreign

DESCRIPTION, GENERATION = "tokenizer_config.json", "generation_config.json"


def read_tokenizer(folder: Path, trust: bool = False) -> Tokenizer | None:
    """The tokenizer of a public folder; None if it has no `tokenizer.json`.

    The token that ends documents is the one that `tokenizer_config.json`, or else config.json, calls `eos`; all that
    these and `generation_config.json` name end what a model writes. Documents start with a token if the tokenizer
    puts one before each text. Unless trusted, a tokenizer that may take much time or memory is refused.

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
    tokenizer = foreign(text, name, trust)
    with library_errors(name):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        bare, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    first = tokenizer.id_to_token(whole[0]) if whole[: len(bare)] != bare else None
    end = _named_end(folder, tokenizer)
    if end is None and not any(tokenizer.token_to_id(token) is not None for token in END_TOKENS):
        raise UserError(
            f"checkpoint: {folder} does not say which token ends a document; name it as eos_token in {DESCRIPTION}."
        )
    return Tokenizer(
        tokenizer, name, end, first, [token for token in map(tokenizer.id_to_token, _stop_ids(folder)) if token]
    )


def _named_end(folder: Path, tokenizer: tokenizers.Tokenizer) -> str | None:
    """Return the token that the folder's configs name as the end of a document, if the tokenizer has it."""
    if (folder / DESCRIPTION).is_file():
        named: Any = read_config(folder, DESCRIPTION).get("eos_token")
        named = named.get("content") if isinstance(named, dict) else named
        if isinstance(named, str) and tokenizer.token_to_id(named) is not None:
            return named
    return next((token for token in map(tokenizer.id_to_token, _stop_ids(folder)) if token is not None), None)


def _stop_ids(folder: Path) -> list[int]:
    """The ids that end what a model writes: those of config.json, of the model of text in it, and for generation."""
    contents = [read_config(folder, CONFIG)]
    if isinstance(inner := contents[0].get("text_config"), dict):
        contents.append(inner)
    if (folder / GENERATION).is_file():
        contents.append(read_config(folder, GENERATION))
    named = [number for each in contents for number in _as_list(each.get("eos_token_id"))]
    # as large as the library's
    return [number for number in dict.fromkeys(named) if 0 <= number < 1 << 32]


def _as_list(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [number for number in values if isinstance(number, int) and not isinstance(number, bool)]


def stop_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The entries of config.json and of generation_config.json about the first token and the last ones."""
    ends = tokenizer.eos_id if len(tokenizer.stop_ids) == 1 else list(tokenizer.stop_ids)
    return {"eos_token_id": ends, "bos_token_id": tokenizer.bos_id}


def described(tokenizer: Tokenizer) -> dict[str, str]:
    """The files that transformers reads a tokenizer from: name → content."""
    names = {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id}
    tokens = {key: tokenizer.decode([number]) for key, number in names.items() if number is not None}
    description = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **tokens}
    return {
        "tokenizer.json": tokenizer.to_json(),
        DESCRIPTION: json.dumps(description, indent=2, ensure_ascii=False),
        GENERATION: json.dumps(stop_config(tokenizer), indent=2),
    }
