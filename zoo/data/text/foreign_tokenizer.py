"""Refuse a `tokenizer.json` that could make the `tokenizers` library run for hours, fill the memory or end the process.

Its regular expressions are searched by backtracking, and each of its normalisers may make text longer. So the file is
read before the library reads it: growth is bounded, and expressions need a form in which backtracking stays polynomial.
All published ones that we know have it, so no list of them is kept; and a wrong guess costs seconds and not hours,
since `Tokenizer` tries long texts with a limit on time.
"""

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tokenizers

from kernels.errors import UserError

MAX_SECONDS = 10  # published tokenizers take a second or less for the texts below, on an idle machine
RUN = 100_000  # of one character, in which a search that tries each position again and again takes much longer
PROBES = "aA1 \n!_字"
MAX_CHARACTERS = 200_000_000  # of the file; the largest published ones have 35 million
MAX_GROWTH = 64  # how many times longer normalisers or decoders may make text
MAX_STEPS, MAX_ADDED = 32, 64  # steps of a sequence; tokens that are added to a text
MAX_PATTERN = 4000  # characters of a regular expression
MAX_CHOICES, MAX_UNBOUNDED = 10, 3  # of one alternative of a regular expression
# Normalisers, and how many characters they make of one, at most. What a "Precompiled" one does is in a binary table.
GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "Strip": 1, "StripAccents": 1, "Nmt": 1}
GROWTH |= {"BertNormalizer": 4, "ByteLevel": 4, "Prepend": 1}
_ATOM = re.compile(
    r"\\[pP]\{\^?[\w ]{1,40}\}|\\x\{[0-9A-Fa-f]{1,8}\}|\\x[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}"  # by name or number
    r"|\\[^1-9kgxupP]|[^\\()\[\]|*+?{]|[\]{]",  # but for references, and what opens or repeats something
    re.DOTALL,
)
_GROUP = re.compile(r"\((\?(:|=|!|<=|<!|>|[imx-]+:))?")
_SEQUENCES = ("normalizers", "pretokenizers", "decoders", "processors")
_FLAGS = re.compile(r"\(\?[imx-]+\)")
_COUNT = re.compile(r"(\*|\+|\?|\{(\d{1,4})\}|\{(\d{0,4}),(\d{0,4})\})[?+]?")


class _Unsafe(ValueError):
    """Why backtracking may take long, as the end of a sentence."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of a key that is set twice, Python keeps the last value and the library may keep the first."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("an object sets a key twice")
    return content


def vet_tokenizer(text: str, name: str) -> None:
    """Refuse the content of a `tokenizer.json` that may take much time or memory to use.

    Raises:
        UserError: It is not JSON, or a part of it is refused; the message names the part.
    """
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"{name} has more than {MAX_CHARACTERS:,} characters.")
    try:
        content = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not a tokenizer.json ({error}).") from None
    if not isinstance(content, dict):
        raise UserError(f"{name} is not a tokenizer.json (it holds no JSON object).")
    for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
        if sum(1 for _ in _steps(content.get(part))) > MAX_STEPS:
            raise UserError(f"{name}: its {part} has more than {MAX_STEPS} steps.")
    for part in ("normalizer", "decoder"):
        growth = 1
        for step in _steps(content.get(part)):
            growth *= _growth(step, part, name)
            if growth > MAX_GROWTH:
                raise UserError(f"{name}: its {part} may make text more than {MAX_GROWTH} times longer.")
    for step in _steps(content.get("post_processor")):
        for key in ("single", "pair"):
            pieces = step.get(key) if step.get("type") == "TemplateProcessing" else None
            sequences = [p["Sequence"].get("id") for p in pieces or () if isinstance(p, dict) and "Sequence" in p]
            if len(sequences) != len(set(sequences)):
                raise UserError(f"{name}: its post_processor repeats the text.")
        named = step.get("special_tokens")
        ids = sum(len(token.get("ids") or ()) for token in named.values()) if isinstance(named, dict) else 0
        if max(ids, len(step.get("single") or ()), len(step.get("pair") or ())) > MAX_ADDED:
            raise UserError(f"{name}: its post_processor adds more than {MAX_ADDED} tokens.")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        for pattern in _patterns(content.get(part)):
            try:
                check_pattern(pattern)
            except _Unsafe as reason:
                raise UserError(
                    f"{name}: its {part} searches for {pattern[:80]!r}, which may take hours: {reason}."
                ) from None


def time_tokenizer(tokenizer: tokenizers.Tokenizer, name: str) -> None:
    """Refuse a tokenizer whose regular expressions take more than `MAX_SECONDS` on long runs of characters."""
    patterns = [*_patterns(json.loads(tokenizer.to_str()))]
    if not patterns:
        return
    others = {character for pattern in patterns for character in pattern} - {*PROBES}
    letters, signs = ([c for c in sorted(others) if c.isalnum() == alike] for alike in (True, False))
    texts = [character * RUN for character in (*PROBES, *letters[:16], *signs[:16])]
    failures: list[UserError] = []

    def encode() -> None:
        try:
            with library_errors(name):
                tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except UserError as error:
            failures.append(error)

    parallel = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread; the library's other threads stay free for others
    thread = threading.Thread(target=encode, daemon=True)  # cannot be ended, but does not keep the process alive
    thread.start()
    thread.join(MAX_SECONDS)
    if parallel is None:
        del os.environ["TOKENIZERS_PARALLELISM"]
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = parallel
    if thread.is_alive():
        searched = f"for {len(texts)} lines of {RUN:,} characters: it searches for {patterns[0][:80]!r}"
        raise UserError(f"{name} takes more than {MAX_SECONDS} s {searched}.")
    if failures:
        raise failures[0]


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


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """A normaliser, decoder or post-processor, or those of a sequence."""
    waiting = [part]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            yield step
            inner = [step[key] for key in _SEQUENCES if isinstance(step.get(key), list)]
            waiting += [each for several in inner for each in several]


def _growth(step: Mapping[str, Any], part: str, name: str) -> int:
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = step.get("pattern"), step.get("content")
        text = pattern.get("String") if isinstance(pattern, dict) else None
        if text == "" or not isinstance(content, str):
            raise UserError(f"{name}: its {part} replaces {text!r} by {content!r:.40}.")
        length = len(text) if isinstance(text, str) else 1  # a regular expression may match one character, or none
        return max(1, -(-len(content) // length) + (text is None))
    if part == "normalizer" and kind != "Sequence":
        if kind not in GROWTH:
            raise UserError(f"{name}: its normalizer {kind!r:.40} is not one of {', '.join([*GROWTH, 'Replace'])}.")
        if kind == "Prepend" and len(str(step.get("prepend"))) > MAX_GROWTH:
            raise UserError(f"{name}: its normalizer prepends more than {MAX_GROWTH} characters.")
        return GROWTH[kind]
    return 1


def _patterns(part: Any) -> Iterator[str]:
    """All regular expressions in a part."""
    waiting = [part]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if isinstance(each.get("Regex"), str):
                yield each["Regex"]
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def check_pattern(pattern: str) -> None:
    """Refuse a regular expression for which backtracking may take exponential time.

    Repeated without bound may be characters, classes, and groups of a fixed length; what else is optional, repeated or
    an alternative inside a group is counted, and limited in each of the pattern's alternatives. References are refused.

    Raises:
        ValueError: With the reason.
    """
    if len(pattern) > MAX_PATTERN:
        raise _Unsafe(f"it has more than {MAX_PATTERN} characters")
    position = 0
    while position < len(pattern):
        position, choices, unbounded = _alternative(pattern, position, depth=0)
        if choices > MAX_CHOICES or unbounded > MAX_UNBOUNDED:
            raise _Unsafe("it has too many repeated or optional parts in a row")
        if position < len(pattern) and pattern[position] == ")":
            raise _Unsafe("it has a parenthesis too many")
        position += 1  # behind |


def _alternative(pattern: str, position: int, depth: int) -> tuple[int, int, int]:
    """Read up to the next | or the end of the group: the position, and the number of choices and unbounded repeats."""
    choices = unbounded = 0
    while position < len(pattern) and pattern[position] not in "|)":
        if flags := _FLAGS.match(pattern, position):
            position = flags.end()
            continue
        fixed = True
        if group := _GROUP.match(pattern, position):
            position, inner, loops = _group(pattern, group.end(), depth + 1)
            choices, unbounded, fixed = choices + inner, unbounded + loops, not inner
        elif pattern[position] == "[":
            position = _class(pattern, position)
        elif atom := _ATOM.match(pattern, position):
            position = atom.end()
        else:
            raise _Unsafe(f"{pattern[position : position + 8]!r} is not understood")
        counts = 0
        while count := _COUNT.match(pattern, position):
            position, counts = count.end(), counts + 1
            variable = count[2] is None  # as {3} is not
            ends = {"*": "", "+": "", "?": "1"}
            end = ends[count[1]] if count[1] in ends else count[2] or count[4]
            most = int(end) if end else None
            if counts > 1 or (not fixed and most != 1):
                raise _Unsafe("it repeats what is repeated")
            choices, unbounded = choices + variable, unbounded + (most is None)
    return position, choices, unbounded


def _group(pattern: str, position: int, depth: int) -> tuple[int, int, int]:
    """Read up to the end of a group: the position behind it, and its choices and unbounded repeats."""
    if depth > 8:
        raise _Unsafe("its groups are nested too deeply")
    choices = unbounded = 0
    while True:
        position, inner, loops = _alternative(pattern, position, depth)
        choices, unbounded = max(choices, inner), max(unbounded, loops)
        if position == len(pattern):
            raise _Unsafe("a group has no end")
        position += 1
        if pattern[position - 1] == ")":
            return position, choices, unbounded
        choices += 1


def _class(pattern: str, position: int) -> int:
    """The position behind a class such as [^a-z[:digit:]\\s]."""
    depth, start = 0, position
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
        elif character == "[":
            depth += 1
            start = position
        elif character == "]" and pattern[start + 1 : position].lstrip("^"):  # first in a class it is a character
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    raise _Unsafe("a class has no end")
