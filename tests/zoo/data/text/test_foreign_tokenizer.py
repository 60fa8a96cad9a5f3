"""Tokenizers that would run for hours, end the process or lose text, and those that are published."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

import zoo
from kernels import UserError
from tests.commands import FIT, Command
from zoo.data import Tokenizer
from zoo.data.text.foreign_tokenizer import check_pattern
from zoo.data.text.tokenizer import training_pieces

pytest_plugins = "tests.desk"
PUBLISHED = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # noqa: E501
    "cl100k, possessive": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",  # noqa: E501
    "Qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # noqa: E501
    "Qwen3.5": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # noqa: E501
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # noqa: E501
    "DeepSeek": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",  # noqa: E501
    "DeepSeek, Chinese": "[一-龥぀-ゟ゠-ヿ]+",
    "BLOOM": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "Falcon": "[0-9][0-9][0-9]",
    "digits from the right": r"\d{1,3}(?=(?:\d{3})*\b)",
    "digits in threes": r"(?=(\d{3})+(?!\d))",
}
CATASTROPHIC = [
    r"(\w+)+!",
    r"(?:\w*)*x",
    r"(a|a)*b",
    r"(a|aa)+$",
    r"(?:a?){40}a{40}",
    "a?" * 30 + "a" * 30,
    "(?:a|a)" * 30 + "b",
    r"(\w)\1+",
    r"(?<n>a)\k<n>",
    r"(?R)",
    r"\w*\w*\w*\w*x",
    r"((a{1,9}){1,9}){1,9}",
    r"a**",
    "(" * 20 + ")" * 20,
    "[",
    "(",
    "x)",
    "a" * 5000,
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_patterns_are_accepted(name: str):
    Regex(PUBLISHED[name])
    check_pattern(PUBLISHED[name])


@pytest.mark.parametrize("pattern", CATASTROPHIC)
def test_patterns_that_may_take_hours(pattern: str):
    with pytest.raises(ValueError, match=r"^(it|a|its|') ?|not understood"):
        check_pattern(pattern)


def byte_level(**parts: Any) -> dict[str, Any]:
    """The JSON of a tokenizer of bytes, with other parts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate(["<eos>", *alphabet])}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return json.loads(made.to_str()) | parts


def split(pattern: str) -> dict[str, Any]:
    """A pre-tokenizer that splits by an expression."""
    parts = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ]
    return {"type": "Sequence", "pretokenizers": parts}


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def token(content: str, **changes: Any) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": 257, "content": content, **flags, **changes}


def metaspace(scheme: str) -> str:
    made = tokenizers.Tokenizer(models.Unigram([("▁", -1.0), *((chr(n), -2.0) for n in range(33, 127))], 0, True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return made.to_str()


TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TWICE = TEMPLATE | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}
HOSTILE = {
    "catastrophic": (byte_level(pre_tokenizer=split(r"(\w+)+!")), "its pre_tokenizer searches for '(\\\\w+)+!'"),
    "growing": (
        byte_level(normalizer={"type": "Sequence", "normalizers": [replace("e", "ee")] * 20}),
        "its normalizer may make text more than 64 times longer",
    ),
    "growing by one": (byte_level(normalizer=replace("e", "e" * 1000)), "more than 64 times longer"),
    "growing from nothing": (byte_level(normalizer=replace("", "e")), "its normalizer replaces '' by 'e'"),
    "growing when decoded": (
        byte_level(decoder={"type": "Sequence", "decoders": [replace("e", "ee")] * 20}),
        "its decoder may make text more than 64 times longer",
    ),
    "a table": (
        byte_level(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "its normalizer 'Precompiled' is not one of NFC",
    ),
    "templates": (
        byte_level(post_processor={"type": "Sequence", "processors": [TWICE] * 20}),
        "its post_processor repeats the text",
    ),
    "nested": ("[" * 100_000, "is not a tokenizer.json"),
    "a list": ("[]", "it holds no JSON object"),
    "truncated": (json.dumps(byte_level())[:-9], "is not a tokenizer.json"),
    "no model": (byte_level(model=None), "is not a tokenizer.json"),
    "a token strips left": (
        byte_level(added_tokens=[token("<m>", lstrip=True)]),
        "'a  <m>  b' comes back as 'a<m>  b'",
    ),
    "a token strips right": (byte_level(added_tokens=[token("<m>", rstrip=True)]), "comes back as 'a  <m>b'"),
    "a part that is set twice": (
        json.dumps(byte_level()).replace('"normalizer"', '"normalizer": {"type": "Replace"}, "normalizer"', 1),
        "an object sets a key twice",
    ),
    "many steps": (
        byte_level(normalizer={"type": "Sequence", "normalizers": [{"type": "StripAccents"}] * 99}),
        "its normalizer has more than 32 steps",
    ),
    "many ids": (
        byte_level(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [],
                "special_tokens": {"x": {"id": "x", "ids": [0] * 999, "tokens": ["x"] * 999}},
            }
        ),
        "its post_processor adds more than 64 tokens",
    ),
    "NFKC": (byte_level(normalizer={"type": "NFKC"}), "does not keep text unchanged"),
    "lower case": (byte_level(normalizer={"type": "Lowercase"}), "does not keep text unchanged"),
    "strip": (byte_level(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}), "' leads'"),
    "Metaspace first": (metaspace("first"), "does not keep text unchanged"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTILE)
def test_a_tokenizer_is_refused_in_one_sentence(command: Command, desk: Path, case: str):
    content, sentence = HOSTILE[case]
    (desk / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    arguments = (*FIT, "--data.tokenizer=tokenizer.json", "--data.vocab_size=null")
    if case == "Metaspace first":
        arguments = (*arguments, "--data.eos_token=!")
    start = time.process_time()
    done = command(*arguments)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert "tokenizer.json" in done.err
    assert sentence in done.err
    assert time.process_time() - start < 5


def test_long_searches_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zoo.data.text.foreign_tokenizer.MAX_SECONDS", 0.2)
    monkeypatch.setattr("zoo.data.text.foreign_tokenizer.RUN", 20_000)  # so that the thread ends soon
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level(pre_tokenizer=split(r"\w*(?<=q)[x-z]|."))))
    with pytest.raises(UserError, match=r"takes more than 0\.2 s for \d+ lines of 20,000 characters"):
        Tokenizer.from_file(tmp_path)


def test_a_failure_of_the_library_is_a_sentence(tmp_path: Path):
    made = tokenizers.Tokenizer.from_str(json.dumps(byte_level(pre_tokenizer=split(r"(\w+)+(?=!)"))))
    with pytest.raises(UserError, match="the tokenizers library failed"):
        Tokenizer(made).encode("a" * 40 + " !")


@pytest.mark.slow
@pytest.mark.parametrize("trust", [False, True])
def test_models_of_others(finished: Path, desk: Path, trust: bool):
    """Trusted, it is used as it is."""
    zoo.export(finished / "runs" / "done", desk / "foreign")
    (desk / "foreign" / "hashes.json").unlink()
    text = json.loads((desk / "foreign" / "tokenizer.json").read_text())
    text["normalizer"] = {"type": "Sequence", "normalizers": [replace("q", "qqq")] * 9}
    (desk / "foreign" / "tokenizer.json").write_text(json.dumps(text))
    if trust:
        assert zoo.load_tokenizer("foreign", trust=True).encode("a")
        return
    with pytest.raises(UserError, match=r"tokenizer of foreign/tokenizer\.json: its normalizer may make text"):
        zoo.load_tokenizer("foreign")


def test_composition_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_level(normalizer=json.loads(_state(normalizers.NFC())))))
    tokenizer = Tokenizer.from_file(tmp_path)
    text = "e\N{COMBINING ACUTE ACCENT}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "normalises text (NFC); that is left out" in caplog.text
    assert tokenizer.alike(Tokenizer.from_json((tmp_path / "tokenizer.json").read_text()))


def _state(part: Any) -> str:
    return part.__getstate__().decode()


@pytest.mark.slow
def test_a_line_without_spaces_trains_in_seconds(command: Command, desk: Path):
    line = "".join(random.Random(0).choices("abcd", k=1_000_000)) + "e" * 2_000_000
    (desk / "line.txt").write_text(f"{line}\n{'ordinary text ' * 1000}\n")
    start = time.process_time()
    done = command(*FIT, "--data.path=line.txt", "--data.max_characters=null", "--trainer.max_steps=1")
    assert done.code == 0, done.err
    assert time.process_time() - start < 60


def test_ordinary_text_is_cut_only_after_lines():
    text = ("Some words, " * 50 + "\n" + "x" * 1000 + " " * 30 + "=" * 800 + " " + "1" * 1000 + "\n") * 40
    assert all(piece.endswith("\n") for piece in training_pieces(text))
    assert "".join(training_pieces(text)) == text
    long = "y" * 2500 + "é1" * 10 + "_" * 1500 + " " * 3000 + "字" * 1001
    pieces = [*training_pieces(long)]
    assert "".join(pieces) == long
    assert max(len(run[0]) for piece in pieces for run in re.finditer(r"([^\W\d]|\d|_|\s)\1*", piece)) <= 1000
