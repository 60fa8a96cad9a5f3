"""Conversion of the tokenizer of a public folder to ours, and back."""

import json
from typing import Any

import tokenizers

from kernels import UserError
from zoo.data.text.tokenizer import END_TOKENS, Tokenizer, foreign, library_errors
from zoo.saved.public.folder import CONFIG, PublicFolder

TOKENIZER, DESCRIPTION, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


def read_tokenizer(folder: PublicFolder) -> Tokenizer | None:
    """The tokenizer of a public folder; None if it has no `tokenizer.json`.

    The token that ends documents is the one that `tokenizer_config.json`, or else config.json, calls `eos`; all that
    these and `generation_config.json` name end what a model writes. Documents start with a token if the tokenizer
    puts one before each text.

    Raises:
        UserError: The file is damaged, or says nowhere which token ends a document.
    """
    if not folder.has(TOKENIZER):
        return None
    name = f"checkpoint: {folder.path / TOKENIZER}"
    tokenizer = foreign(folder.text(TOKENIZER), name)
    with library_errors(name):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        bare, whole = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    first = tokenizer.id_to_token(whole[0]) if whole[: len(bare)] != bare else None
    stops = [token for token in map(tokenizer.id_to_token, _stop_ids(folder)) if token is not None]
    end = _described_end(folder, tokenizer) or next(iter(stops), None)
    if end is None and not any(tokenizer.token_to_id(token) is not None for token in END_TOKENS):
        raise UserError(
            f"checkpoint: {folder.path} does not say which token ends a document; name it as eos_token in "
            f"{DESCRIPTION}."
        )
    return Tokenizer(tokenizer, name, end, first, [token for token in stops if token])


def _described_end(folder: PublicFolder, tokenizer: tokenizers.Tokenizer) -> str | None:
    """The token that `tokenizer_config.json` names as the end of a document, if the tokenizer has it."""
    named: Any = folder.config(DESCRIPTION).get("eos_token") if folder.has(DESCRIPTION) else None
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) and tokenizer.token_to_id(named) is not None else None


def _stop_ids(folder: PublicFolder) -> list[int]:
    """The ids that end what a model writes: those of config.json, of the model of text in it, and for generation."""
    contents = [folder.config(CONFIG)]
    if isinstance(inner := contents[0].get("text_config"), dict):
        contents.append(inner)
    if folder.has(GENERATION):
        contents.append(folder.config(GENERATION))
    ids: list[Any] = []
    for each in contents:
        named = each.get("eos_token_id")
        ids += named if isinstance(named, list) else [named]
    # as large as the library's
    return list(dict.fromkeys(number for number in ids if type(number) is int and 0 <= number < 1 << 32))


def stop_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The entries of config.json and of generation_config.json about the first token and the last ones."""
    ends = tokenizer.eos_id if len(tokenizer.stop_ids) == 1 else list(tokenizer.stop_ids)
    return {"eos_token_id": ends, "bos_token_id": tokenizer.bos_id}


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    """The files that transformers reads a tokenizer from: name → content."""
    names = {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id}
    tokens = {key: tokenizer.decode([number]) for key, number in names.items() if number is not None}
    description = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **tokens}
    return {
        TOKENIZER: tokenizer.to_json(),
        DESCRIPTION: json.dumps(description, indent=2, ensure_ascii=False),
        GENERATION: json.dumps(stop_config(tokenizer), indent=2),
    }
