"""A byte-level BPE tokenizer as the vocabulary of a GGUF file, under the name of llama.cpp's equal pre-tokenizer."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from kernels import UserError
from zoo.data.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# as in the JSON of published tokenizers
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_LINES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_LINES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = "one digit at a time"
# the steps that divide a text, and whether words of the vocabulary are taken without merges → llama.cpp's name
_PRE_TOKENIZERS = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGITS, _GPT2), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
}
NORMAL, CONTROL, ADDED, UNUSED = 1, 3, 4, 5  # kinds of tokens; text can become all but the last


def tokenizer_of(fields: Mapping[str, Any], source: str) -> str | None:
    """Return the JSON of the tokenizer in the fields of a GGUF file; None, with a warning, if its rules are unknown."""
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    model, name = fields.get("model"), fields.get("pre")
    rules = next((rules for rules, theirs in _PRE_TOKENIZERS.items() if theirs == name), None)
    if model != "gpt2" or rules is None:
        log.warning("%s: its tokenizer (%s, %s) has no known rules, so it is left out.", source, model, name)
        return None
    try:
        return _tokenizer(fields, *rules)
    except Exception as error:  # the fields may hold anything, and the library raises plain exceptions
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"checkpoint: {source} has a damaged tokenizer ({reason}).") from None


def _tokenizer(fields: Mapping[str, Any], steps: Sequence[str], ignore_merges: bool) -> str:
    """Return the JSON of the tokenizer with these steps before its merges."""
    bos = fields["bos_token_id"] if fields.get("add_bos_token") else None
    if bos is not None and not 0 <= bos < len(fields["tokens"]):
        raise ValueError(f"bos_token_id is {bos}")
    kinds = dict(zip(fields["tokens"], fields["token_type"], strict=True))
    return byte_level_bpe(
        {text: i for i, text in enumerate(fields["tokens"]) if kinds[text] in (NORMAL, CONTROL, ADDED)},
        fields["merges"],
        steps=[None if step == _DIGITS else step for step in steps if step != _GPT2],
        regex=_GPT2 in steps,
        ignore_merges=ignore_merges,
        special_tokens=[text for text, kind in kinds.items() if kind == CONTROL],
        added_tokens=[text for text, kind in kinds.items() if kind == ADDED],
        bos_token=None if bos is None else fields["tokens"][bos],
    ).to_str()


def fields_of(tokenizer: Tokenizer | None, size: int) -> dict[str, Any]:
    """Return the fields of a tokenizer in a GGUF file: its vocabulary, padded to the `size` of a model's embeddings.

    A UserError if no pre-tokenizer of llama.cpp has the tokenizer's rules, or it has tokens beyond `size`.
    """
    if tokenizer is None:
        return {"tokenizer.ggml.model": "none"}
    content = json.loads(tokenizer.to_json())
    name = _pre_tokenizer(content)
    if tokenizer.vocab_size > size:
        raise UserError(f"to: the tokenizer has {tokenizer.vocab_size} tokens, and the model {size}.")
    tokens, kinds = [f"unused {i}" for i in range(size)], [UNUSED] * size  # with a space, which byte-level text lacks
    for token, i in content["model"]["vocab"].items():
        tokens[i], kinds[i] = token, NORMAL
    for added in content["added_tokens"]:
        if not added["special"] and (changes := [key for key in ("lstrip", "rstrip", "single_word") if added[key]]):
            raise _refusal(f"the added token {added['content']!r} has {changes[0]}")
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL if added["special"] else ADDED
    turns = tokenizer.stop_ids[1:]
    if len(turns) > 1:
        log.warning("GGUF holds one more token at which generation stops, %r; others are left out.", tokens[turns[0]])
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": name,
        "tokens": tokens,
        "token_type": kinds,
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]],
        "eos_token_id": tokenizer.eos_id,
        # llama.cpp requires this token; in our data, a document follows the end token of the previous one
        "bos_token_id": tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id,
        "add_bos_token": tokenizer.bos_id is not None,
        "add_eos_token": False,
    }
    if turns:
        fields["eot_token_id"] = turns[0]
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


def _pre_tokenizer(content: dict[str, Any]) -> str:
    """Return llama.cpp's name for the rules in the content of a `tokenizer.json`."""
    model = content["model"]
    if model["type"] != "BPE":
        raise _refusal(f"its model is {model['type']} and not BPE")
    for key in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise _refusal(f"its model has {key}")
    normalizer = content.get("normalizer")
    if normalizer == {"type": "NFC"}:
        log.warning("The tokenizer composes characters (NFC) and llama.cpp does not: give it text that is composed.")
    elif normalizer is not None:
        raise _refusal(f"it has the normalizer {normalizer['type']}")
    steps = _steps(content.get("pre_tokenizer"))
    if (name := _PRE_TOKENIZERS.get((steps, bool(model.get("ignore_merges"))))) is None:
        words = "takes" if model.get("ignore_merges") else "does not take"
        raise _refusal(f"it {words} words of the vocabulary without merges, and divides text by {' and '.join(steps)}")
    return name


def _steps(pre_tokenizer: dict[str, Any] | None) -> tuple[str, ...]:
    """Return the steps of a pre-tokenizer that divide a text, before its bytes become characters."""
    parts = [pre_tokenizer or {"type": "nothing"}]
    if parts[0]["type"] == "Sequence":
        parts = parts[0]["pretokenizers"]
    *before, last = parts
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise _refusal(f"its last step before merges is {json.dumps(last)[:80]} and not bytes")
    steps = [_step(part) for part in before]
    return (*steps, _GPT2) if last["use_regex"] else tuple(steps)


def _step(part: dict[str, Any]) -> str:
    if part["type"] == "Digits" and part["individual_digits"]:
        return _DIGITS
    if part["type"] == "Split" and (part["behavior"], part["invert"]) == ("Isolated", False):
        return part["pattern"].get("Regex", json.dumps(part["pattern"]))
    return json.dumps(part)


def _refusal(reason: str) -> UserError:
    return UserError(f"to: no pre-tokenizer of llama.cpp equals that of this tokenizer: {reason}.")


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
