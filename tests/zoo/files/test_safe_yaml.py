"""Values that YAML and plain containers may hold are read unchanged, and others are refused in one sentence."""

from pathlib import Path

import pytest

from kernels import UserError
from zoo.config.find import CONFIGS
from zoo.files.safe_yaml import check_plain, dump_yaml, parse_yaml, read_yaml


def test_what_ships_is_small():
    for path in CONFIGS.rglob("*.yaml"):
        check_plain(read_yaml(path), "config")


STARTS = ("", "%YAML 1.3\n---\n", "%YAML 2.0\n---\n", "%TAG ! !\n---\n", "@ ", "%TAG ! x\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "is not YAML: [^<]*(<stream end>)?[^<]*$") for text in ("{a: [", "[1,", "a: [1\nb: 2", "\x00")),
        ('"\\udcff"', "is not YAML: [^<]*(<stream end>)?[^<]*$"),
        *((start + "[" * 100_000, "(is not YAML: |is nested more than)") for start in STARTS),
        *((text, ".*nested more than 100 levels deep") for text in ("[" * 101, "{a: " * 101, "- " * 101, "? " * 101)),
        ("[" * 1_000_000, ".*nested more than 100 levels deep"),
        *((f"a: {text}", "is not YAML: ") for text in ("!!int ''", "1" + ":59" * 200 + ".0")),
        ("a: *b", "is not YAML: .*undefined alias 'b'"),
        ("a: @b", "is not YAML: .*character '@'"),
        *((text, ".*") for text in ("a: 2026-99-99", "{[a]: b}", "a: !!binary ü", "a: " + "9" * 5000)),
    ],
    ids=lambda value: value[:20],
)
def test_text_that_is_refused(text: str, message: str):
    with pytest.raises(UserError, match=rf"^optim\.betas {message}"):
        parse_yaml(text, "optim.betas")


@pytest.mark.parametrize("good", [0, "", False, None])
def test_a_key_that_is_no_text_is_refused_behind_any_other(good: object):
    for bad in ((), b"", (1,), b"x"):
        with pytest.raises(UserError, match=r"^config has a key .*, which is not a string"):
            check_plain({"a": {good: 1, bad: 2}}, "config")


def test_merged_keys_and_anchors_used_twice():
    text = "a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: &b [1]\nd: *b\ne: &s text\nf: *s\n"
    assert parse_yaml(text, "config")["b"] == {"x": 1, "y": 2}
    assert parse_yaml(text, "config")["f"] == "text"


@pytest.mark.parametrize(
    ("text", "lines"),
    [("a: 1\nb: 2\na: 3\n", (3, 1)), ("m:\n  k: 1\n\n  'k': 2\n", (4, 2)), ("- {x: 1, y: 2,\n   x: 3}\n", (2, 1))],
)
def test_a_key_that_is_set_twice_is_refused(text: str, lines: tuple[int, int]):
    with pytest.raises(UserError, match=rf"^config: it, line {lines[0]} sets '\w' again, which line {lines[1]} sets"):
        parse_yaml(text, "config: it")


def test_what_is_not_plain_is_refused():
    part: list = []
    part.append(part)
    with pytest.raises(UserError, match="levels deep"):
        check_plain(part, "config")
    for value, message in (
        ({(1, 2): 3}, r"config has a key \(1, 2\), which is not a string"),
        ({"a": {1, 2}}, "config holds a set, which does not belong in a config"),
        ({"a": Path()}, "config holds a PosixPath, which does not belong in a config"),
    ):
        with pytest.raises(UserError, match=message):
            check_plain(value, "config")


@pytest.mark.parametrize("text", ["\x85a", "a\x85", "a \u2028 b", "\u2029", "a\nb\x85c", "1e5\x85"])
def test_line_breaks_of_unicode_are_kept(text: str):
    assert parse_yaml(dump_yaml({"key": text}), "config") == {"key": text}
