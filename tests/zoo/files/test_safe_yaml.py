"""Values that YAML and plain containers may hold are read unchanged, and others are refused in one sentence."""

from pathlib import Path

import pytest

from kernels import UserError
from zoo.config.find import CONFIGS
from zoo.files.safe_yaml import check_plain, dump_yaml, parse_yaml, read_yaml


def test_what_ships_is_small():
    for path in CONFIGS.rglob("*.yaml"):
        check_plain(read_yaml(path), "config")


@pytest.mark.parametrize("text", ["{a: [", "[1,", "a: [1\nb: 2", "\x00", '"\\udcff"'])
def test_text_that_is_not_yaml_is_called_by_its_name(text: str):
    with pytest.raises(UserError, match=r"^optim\.betas is not YAML: [^<]*(<stream end>)?[^<]*$"):
        parse_yaml(text, "optim.betas")


@pytest.mark.parametrize("start", ["", "%YAML 1.3\n---\n", "%YAML 2.0\n---\n", "%TAG ! !\n---\n", "@ ", "%TAG ! x\n"])
def test_broken_text_with_many_brackets_is_refused(start: str):
    with pytest.raises(UserError, match=r"^config (is not YAML: |is nested more than)"):
        parse_yaml(start + "[" * 100_000, "config")


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


@pytest.mark.parametrize("text", ["[" * 101, "{a: " * 101, "- " * 101, "? " * 101, "[" * 1_000_000])
def test_depth(text: str):
    with pytest.raises(UserError, match="nested more than 100 levels deep"):
        parse_yaml(text, "config")


@pytest.mark.parametrize(
    "text", ["a: *nobody", "a: [", "a: 2026-99-99", "{[a]: b}", "a: !!binary ü", "\x00", "a: " + "9" * 5000]
)
def test_one_sentence(text: str):
    with pytest.raises(UserError, match=r"^config: .*"):
        parse_yaml(text, "config: it")


@pytest.mark.parametrize("text", ["!!int ''", "1" + ":59" * 200 + ".0"])
def test_an_impossible_number_is_not_yaml(text: str):
    with pytest.raises(UserError, match=r"^config is not YAML: "):
        parse_yaml("a: " + text, "config")


@pytest.mark.parametrize(("text", "part"), [("a: *b", "undefined alias 'b'"), ("a: @b", "character '@'")])
def test_a_syntax_error_names_what_is_wrong(text: str, part: str):
    with pytest.raises(UserError, match=rf"^config is not YAML: .*{part}"):
        parse_yaml(text, "config")


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
