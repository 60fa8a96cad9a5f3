"""Tokenizers that are not one, lose text, or fail in the library, and documents that would take it long to train on."""

import json
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from kernels import UserError
from tests.commands import FIT, Command
from zoo.data import Tokenizer
from zoo.data.text.tokenizer import training_pieces


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


HOSTILE = {
    "nested": ("[" * 100_000, "is not a tokenizer.json"),
    "a list": ("[]", "is not a tokenizer.json"),
    "truncated": (json.dumps(byte_level())[:-9], "is not a tokenizer.json"),
    "no model": (byte_level(model=None), "is not a tokenizer.json"),
    "a token strips left": (
        byte_level(added_tokens=[token("<m>", lstrip=True)]),
        "'a  <m>  b' comes back as 'a<m>  b'",
    ),
    "a token strips right": (byte_level(added_tokens=[token("<m>", rstrip=True)]), "comes back as 'a  <m>b'"),
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
    said = command(*arguments).sentence()
    assert "tokenizer.json" in said
    assert sentence in said
    assert time.process_time() - start < 5


def test_a_failure_of_the_library_is_a_sentence(tmp_path: Path):
    made = tokenizers.Tokenizer.from_str(json.dumps(byte_level(pre_tokenizer=split(r"(\w+)+(?=!)"))))
    with pytest.raises(UserError, match="the tokenizers library failed"):
        Tokenizer(made).encode("a" * 40 + " !")


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
    command(*FIT, "--data.path=line.txt", "--data.max_characters=null", "--trainer.max_steps=1").ok()
    assert time.process_time() - start < 60


def test_ordinary_text_is_cut_only_after_lines():
    text = ("Some words, " * 50 + "\n" + "x" * 1000 + " " * 30 + "=" * 800 + " " + "1" * 1000 + "\n") * 40
    assert all(piece.endswith("\n") for piece in training_pieces(text))
    assert "".join(training_pieces(text)) == text
    long = "y" * 2500 + "é1" * 10 + "_" * 1500 + " " * 3000 + "字" * 1001
    pieces = [*training_pieces(long)]
    assert "".join(pieces) == long
    assert max(len(run[0]) for piece in pieces for run in re.finditer(r"([^\W\d]|\d|_|\s)\1*", piece)) <= 1000
