"""Byte-level BPE: trained on the corpus, or a user's `tokenizer.json`."""

import hashlib
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from kernels.errors import UserError
from mixers import did_you_mean
from zoo.data.text.cache import build_once, cache_folder
from zoo.data.text.documents import Document, Tokens
from zoo.files.atomic import atomic_write
from zoo.files.sealed_json import read_sealed, write_sealed

log = logging.getLogger(__name__)

EOS = "<eos>"
END_TOKENS = (EOS, "</s>", "<|endoftext|>", "<|end_of_text|>")
SMALLEST_VOCABULARY = 257  # all bytes, and the end of a document
LARGEST_VOCABULARY = 10_000_000  # the library first reserves memory for all tokens, and aborts the process without it
# More text hardly changes the vocabulary, but training keeps all distinct words in memory.
TRAINING_CHARACTERS = 200_000_000
TRAINING_PIECE = 20_000
LONGEST_WORD = 1000  # characters in training
_KINDS = (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s")  # of characters, as the library divides text into words
_LONG_SPACE = re.compile(rf"\s{{{LONGEST_WORD}}}")
_LONG_WORD = re.compile("|".join(f"{kind}{{{LONGEST_WORD}}}(?={kind})" for kind in _KINDS))
_FORMAT = 1
_CHECKSUM = "checksum.json"  # in the folder of a trained tokenizer
# Letters, spaces and lines of all kinds, also where tokenizers strip them, and characters that normalisers replace.
_PROBES = (
    "A line,  Übergröße 字\n\tand 😀.",
    " leads",
    "  leads",
    "trails \n ",
    "\n\n lines",
    "e\N{COMBINING ACUTE ACCENT} \N{ANGSTROM SIGN} \N{LATIN SMALL LIGATURE FI} \N{FULLWIDTH LATIN CAPITAL LETTER A}",
)
_PROBED_TOKENS = 1000  # added tokens, at most
# Files of other libraries, and where a tokenizer.json comes from.
_FOREIGN = {
    ".model": "SentencePiece; a tokenizer.json is needed, which is mostly published with it",
    ".tiktoken": "tiktoken; a tokenizer.json is needed, and docs/data.md says how to make one",
}
# Key in the entry of an added token (where other programs ignore unknown keys) for its role in documents.
_ROLES = "document_roles"


class Documents(Protocol):
    """Documents on which a tokenizer is trained."""

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents, the same each time."""

    def signature(self) -> str:
        """A hash that changes when a document does."""


class Tokenizer:
    """Converts text to token ids and back without loss: text that spells a special token is encoded as plain text.

    Args:
        tokenizer: The tokenizer of the `tokenizers` library.
        name: Its name in error messages.
        eos_token: The token that ends every document; None: the first of `END_TOKENS` that it has.
        bos_token: The token at the start of every document; None: no such token.
        stop_tokens: Other tokens that end what a model writes, such as that of its turn in a dialogue.

    Attributes:
        vocab_size: The largest id + 1.
        eos_id: The id that ends every document.
        bos_id: The id at the start of every document, or None.
        stop_ids: `eos_id`, and the ids of `stop_tokens`.
        special_tokens: The tokens that `encode` parses on request only.
        hash: SHA-256 of the tokenizer's JSON; equal hashes mean equal tokenizers.

    Raises:
        UserError: It does not have these tokens.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        name: str = "tokenizer",
        eos_token: str | None = None,
        bos_token: str | None = None,
        stop_tokens: Sequence[str] = (),
    ) -> None:
        tokenizer.no_truncation()  # some published files set it, which would lose text
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # "<eos>" inside a document must not end it
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        default = next((token for token in END_TOKENS if token in vocabulary), None)
        end = eos_token or default
        if end is None:
            raise UserError(
                f"{name} has no end-of-document token; one of {', '.join(END_TOKENS)} is needed, "
                "or another one named by data.eos_token."
            )
        for key, token in (("eos_token", end), ("bos_token", bos_token)):
            if token is not None and token not in vocabulary:
                special = [str(added) for added in tokenizer.get_added_tokens_decoder().values()]
                hint = did_you_mean(token, special) or f"; its special tokens are {', '.join(special[:20]) or 'none'}."
                raise UserError(f"{name} has no token {token!r} (data.{key}){hint}")
        roles = {"eos": [end]} if end != default else {}
        roles |= {} if bos_token is None else {"bos": [bos_token]}
        if stops := [token for token in dict.fromkeys(stop_tokens) if token != end and token in vocabulary]:
            roles["stop"] = stops
        # they keep their ids
        tokenizer.add_special_tokens([token for role in ("eos", "bos") for token in roles.get(role, ())])
        added = {str(token) for token in tokenizer.get_added_tokens_decoder().values()}
        tokenizer.add_special_tokens([token for token in stops if token not in added])
        self._tokenizer = tokenizer
        self._json = _with_roles(tokenizer.to_str(), roles)
        self.special_tokens = [t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special]
        self.eos_id: int = vocabulary[end]
        self.bos_id: int | None = None if bos_token is None else vocabulary[bos_token]
        self.stop_ids: tuple[int, ...] = (self.eos_id, *(vocabulary[token] for token in stops))
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.hash: str = hashlib.sha256(self._json.encode()).hexdigest()

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """Token ids of a text, without an end token; what spells a special token is one only with `special_tokens`."""
        try:
            self._tokenizer.encode_special_tokens = not special_tokens
            return self.encode_batch([text])[0]
        finally:
            self._tokenizer.encode_special_tokens = True

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, in several threads if the process may use them."""
        with library_errors("data.tokenizer"):
            return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens spelt out."""
        with library_errors("data.tokenizer"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray | None:
        """The UTF-8 bytes of each token's text, int64 `[vocab_size]`; special tokens have none.

        None if the bytes of a text's tokens are not those of the text.
        """
        sizes = token_bytes(self._tokenizer)
        surplus = {
            int(sizes[ids].sum()) - len(text.encode())
            for text, ids in zip(_PROBES, self.encode_batch(list(_PROBES)), strict=True)
        }
        return sizes if surplus <= {0, 1} else None

    def save(self, path: str | Path) -> None:
        """Write the tokenizer to a file, or to `tokenizer.json` in an existing folder."""
        path = Path(path)
        with atomic_write(path / "tokenizer.json" if path.is_dir() else path) as file:
            file.write(self._json.encode())

    @classmethod
    def from_file(
        cls, path: str | Path, eos_token: str | None = None, bos_token: str | None = None, name: str | None = None
    ) -> "Tokenizer":
        """Load a `tokenizer.json`, or the one in a folder.

        Args:
            path: The file or folder.
            eos_token, bos_token: As above, except that None takes the tokens that `save` recorded, if any.
            name: Its name in error messages; None: its path.

        Raises:
            UserError: The file is missing, is not a tokenizer, does not have these tokens, or would lose text.
        """
        file = Path(path).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        name = name or f"data.tokenizer: {file}"
        if origin := _FOREIGN.get(file.suffix):
            raise UserError(f"{name} is a file of {origin}.")
        if not file.is_file():
            fetched = "those of configs/data are fetched as the header of the config says"
            raise UserError(f"{name} does not exist; a tokenizer.json or a folder with one is needed ({fetched}).")
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"{name} cannot be read as text ({error}).") from error
        library, roles = foreign(text, name), _roles(text, name)
        if isinstance(library.normalizer, normalizers.NFC):
            library.normalizer = None
            log.warning("%s normalises text (NFC); that is left out, so that documents come back as they are.", name)
        loaded = cls(library, name, eos_token or roles["eos"], bos_token or roles["bos"], roles["stop"])
        loaded.check_lossless(name)
        return loaded

    def check_lossless(self, name: str) -> None:
        """Check that texts come back as they are.

        Raises:
            UserError: One does not; the message begins with `name`.
        """
        added = [str(token) for token in self._tokenizer.get_added_tokens_decoder().values()]
        texts = [*_PROBES, *(f"a  {token}  b" for token in added[:_PROBED_TOKENS])]
        for text, ids in zip(texts, self.encode_batch(texts), strict=True):
            if (back := self.decode(ids)) != text:
                raise UserError(
                    f"{name} does not keep text unchanged: {text!r} comes back as {back!r}; use a byte-level "
                    "tokenizer or one with byte fallback, such as those of GPT-2 and Llama 2."
                )

    def alike(self, other: "Tokenizer") -> bool:
        """Return whether both read documents alike, but for how they compose characters (NFC)."""
        return self.hash == other.hash or _as_read(self._json) == _as_read(other._json)

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        return self._json

    @classmethod
    def from_json(cls, text: str, name: str = "tokenizer") -> "Tokenizer":
        """The tokenizer of a `to_json`; messages begin with `name`.

        Raises:
            UserError: It is not a tokenizer, or lacks its tokens.
        """
        library, roles = foreign(text, name), _roles(text, name)
        return cls(library, name, roles["eos"], roles["bos"], roles["stop"])

    def __reduce__(self) -> tuple:
        return Tokenizer.from_json, (self._json,)


def foreign(text: str, name: str) -> tokenizers.Tokenizer:
    """The library's tokenizer of a `tokenizer.json`; a UserError that begins with `name` if it is not one."""
    try:
        with library_errors(name):
            return tokenizers.Tokenizer.from_str(text)
    except UserError as error:
        raise UserError(f"{name} is not a tokenizer.json ({str(error).removeprefix(name).strip()})") from None


@contextmanager
def library_errors(name: str) -> Iterator[None]:
    """Turn errors of the library, panics of its Rust code included, into a UserError that begins with `name`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"{name} cannot be used ({' '.join(str(error).split())}).") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's is not to be imported
            raise
        raise UserError(
            f"{name} cannot be used: the tokenizers library failed ({' '.join(str(error).split())})."
        ) from None


def _as_read(text: str) -> Any:
    """The content of a `tokenizer.json` without what plays no part in reading documents."""
    content = json.loads(text)
    for token in content["added_tokens"]:
        if roles := [role for role in token.pop(_ROLES, ()) if role != "stop"]:
            token[_ROLES] = roles
    return content | {"normalizer": None} if content.get("normalizer") == {"type": "NFC"} else content


def _with_roles(text: str, roles: dict[str, list[str]]) -> str:
    """The text of a `tokenizer.json` with roles (role → tokens) recorded in its added tokens."""
    if not roles:
        return text
    content = json.loads(text)
    for token in content["added_tokens"]:
        if token_roles := [role for role, names in roles.items() if token["content"] in names]:
            token[_ROLES] = token_roles
    return json.dumps(content, ensure_ascii=False)


def _roles(text: str, name: str) -> dict[str, Any]:
    """The tokens of the roles "eos" and "bos", and the list of "stop", recorded by `_with_roles`.

    A UserError that begins with `name` if what is recorded is not a list of roles.
    """
    roles: dict[str, Any] = {"eos": None, "bos": None, "stop": []}
    if _ROLES in text:  # parsing files of several MB takes time
        for token in json.loads(text)["added_tokens"]:
            recorded = token.get(_ROLES, [])
            if not isinstance(recorded, list) or any(role not in [*roles] for role in recorded):
                raise UserError(f"{name} has {_ROLES} {recorded!r:.40}; a list of {', '.join(roles)} is expected.")
            for role in recorded:
                if role == "stop":
                    roles["stop"].append(token["content"])
                elif roles.get(role) is None:
                    roles[role] = token["content"]
    return roles


def check_size(vocab_size: int) -> None:
    """Raise a UserError unless a byte-level tokenizer can be trained with so many tokens."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(
            f"data.vocab_size is {vocab_size}; a byte-level tokenizer needs at least {SMALLEST_VOCABULARY}."
        )
    if vocab_size > LARGEST_VOCABULARY:
        raise UserError(f"data.vocab_size is {vocab_size}; it can be at most {LARGEST_VOCABULARY:,}.")


def train_tokenizer(
    corpus: Documents, vocab_size: int, eos_token: str | None = None, bos_token: str | None = None
) -> Tokenizer:
    """Train byte-level BPE on a corpus, or take it from the cache. Equal text gives equal tokenizers.

    Its only special token is `<eos>`, which may also serve as `bos_token`.

    A small corpus may have too few distinct pairs for `vocab_size` tokens: then there are fewer, which is logged.

    Raises:
        UserError: `vocab_size` is below 257 or above 10 million, a token does not exist, or the corpus or the cache
            cannot be used.
    """
    check_size(vocab_size)
    key = hashlib.sha256(f"{_FORMAT} {vocab_size} {corpus.signature()}".encode()).hexdigest()[:16]
    folder = cache_folder() / "tokenizers" / key
    build_once(folder, lambda new: _save(_train(corpus, vocab_size), new))
    file, advice = folder / "tokenizer.json", f"delete {folder} to train it again"
    expected = read_sealed(folder / _CHECKSUM, advice=advice).get("tokenizer")
    if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != expected:
        raise UserError(
            f"{file} is missing or was altered: it does not match the hash of the trained tokenizer; {advice}."
        )
    return Tokenizer.from_file(folder, eos_token, bos_token, "data.tokenizer: the trained tokenizer (null)")


def _save(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(folder)
    write_sealed(folder / _CHECKSUM, {"tokenizer": tokenizer.hash})


def _train(corpus: Documents, vocab_size: int) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_head(corpus), trainer)
    trained = Tokenizer(tokenizer)
    if trained.vocab_size < vocab_size:
        log.info("%s gives only %d of data.vocab_size=%d tokens.", corpus, trained.vocab_size, vocab_size)
    return trained


def _head(corpus: Documents) -> Iterator[str]:
    left = TRAINING_CHARACTERS
    for text in corpus:
        yield from training_pieces(text)
        left -= len(text)
        if left < 0:
            log.info("The tokenizer is trained on the first %d characters of %s.", TRAINING_CHARACTERS - left, corpus)
            return


def training_pieces(text: Document) -> Iterator[str]:
    """Cut a document into pieces of about 20,000 characters, after lines, and inside words that no language has.

    The library holds hundreds of texts in memory, at 100 bytes per character, and the time it takes grows with
    the square of a word's length.
    """
    if isinstance(text, Tokens):
        raise UserError("data.tokenizer is null, but the data are tokens; name the tokenizer.json that made them.")
    start = 0
    while start < len(text):
        end = text.find("\n", start + TRAINING_PIECE) + 1 or len(text)
        yield from _without_long_words(text[start:end])
        start = end


def _without_long_words(piece: str) -> Iterator[str]:
    """Cut runs of one kind of character after each `LONGEST_WORD`."""
    words = piece.split()
    spaces = len(piece) - sum(map(len, words)) - len(words)  # without those that separate words
    # cheap, and nearly always enough to know
    spaced = spaces < LONGEST_WORD or not _LONG_SPACE.search(piece)
    if spaced and max(map(len, words), default=0) <= LONGEST_WORD:
        yield piece
        return
    start = 0
    for run in _LONG_WORD.finditer(piece):
        yield piece[start : run.end()]
        start = run.end()
    if start < len(piece):
        yield piece[start:]


_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token of tokenizers with byte fallback


def token_bytes(tokenizer: tokenizers.Tokenizer) -> np.ndarray:
    """Return the bytes of each token's text, int64 `[vocab_size]`; special tokens, and ids of no token, have none.

    Losses of different tokenizers can be compared by them.

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
