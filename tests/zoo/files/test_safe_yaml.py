"""YAML that would be more than it looks like."""

from pathlib import Path

import pytest

from kernels import UserError
from zoo.config.find import CONFIGS
from zoo.files.safe_yaml import (
    MOST_BYTES,
    MOST_NODES,
    check_plain,
    dump_yaml,
    parse_yaml,
    read_yaml,
)


def test_what_ships_is_small():
    for path in CONFIGS.rglob("*.yaml"):
        check_plain(read_yaml(path), "config")


def aliases(levels: int) -> str:
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


def test_an_alias_counts_as_what_it_stands_for(monkeypatch: pytest.MonkeyPatch):
    assert len(parse_yaml(aliases(4), "config")) == 4  # 10 + 100 + 1,000 + 10,000
    monkeypatch.setattr("zoo.files.safe_yaml.yaml.load", lambda *arguments, **more: pytest.fail("objects were built"))
    for levels in (5, 6, 20):
        with pytest.raises(UserError, match=f"config has more than {MOST_NODES:,} values"):
            parse_yaml(aliases(levels), "config")


@pytest.mark.parametrize("text", ["{a: [", "[1,", "a: [1\nb: 2", "\x00", '"\\udcff"'])
def test_text_that_is_not_yaml_is_called_by_its_name(text: str):
    with pytest.raises(UserError, match=r"^optim\.betas is not YAML: [^<]*(<stream end>)?[^<]*$"):
        parse_yaml(text, "optim.betas")


@pytest.mark.parametrize("start", ["", "%YAML 1.3\n---\n", "%YAML 2.0\n---\n", "%TAG ! !\n---\n"])
def test_broken_text_with_many_brackets_is_refused(start: str):
    with pytest.raises(UserError, match=r"^config (is not YAML: |is nested more than)"):
        parse_yaml(start + "[" * 100_000, "config")


@pytest.mark.parametrize("good", [0, "", False, None])
def test_a_key_that_is_no_text_is_refused_behind_any_other(good: object):
    for bad in ((), b"", (1,), b"x"):
        with pytest.raises(UserError, match=r"^config has a key .*, which is not a string"):
            check_plain({good: 1, bad: 2}, "config")


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


@pytest.mark.parametrize("text", ["{}1", "!!int '{} 1'", "!!int '{}\u0661'", "!!float '{} 1'"])
def test_a_number_to_the_base_of_60_is_short(text: str):
    with pytest.raises(UserError, match=r"^config has a number of more than 10,000 characters\.$"):
        parse_yaml("a: " + text.format("1:" * 20_000), "config")


@pytest.mark.parametrize("text", ["!!int ''", "1" + ":59" * 200 + ".0"])
def test_an_impossible_number_is_not_yaml(text: str):
    with pytest.raises(UserError, match=r"^config is not YAML: "):
        parse_yaml("a: " + text, "config")


@pytest.mark.parametrize(("text", "part"), [("a: *b", "undefined alias 'b'"), ("a: @b", "character '@'")])
def test_a_syntax_error_names_what_is_wrong(text: str, part: str):
    with pytest.raises(UserError, match=rf"^config is not YAML: .*{part}"):
        parse_yaml(text, "config")


def test_a_file_is_short(tmp_path: Path):
    assert parse_yaml("a: " + "word " * 20_000, "config")["a"].startswith("word")
    (tmp_path / "large.yaml").write_text("a: " + "x" * (MOST_BYTES + 1))
    with pytest.raises(UserError, match="has more than 16,777,216 bytes"):
        read_yaml(tmp_path / "large.yaml")


def test_shared_parts_of_a_value_count_each_time():
    part: list = ["x"]
    for _ in range(30):
        part = [part, part]
    with pytest.raises(UserError, match="more than"):
        check_plain(part, "config")
    part = []
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


@pytest.mark.parametrize("head", ["%YAML 1.3\n---\n", "@ ", "%TAG ! x\n"])
@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000])
def test_depth_behind_what_is_not_yaml(head: str, text: str):
    with pytest.raises(UserError, match=r"^a\.yaml is "):
        parse_yaml(head + text, "a.yaml")


@pytest.mark.parametrize("key", [(), (1,), b"", frozenset()])
def test_keys_that_count_as_false_are_checked_too(key: object):
    for mapping in ({key: 1}, {"a": {"b": 1, key: 2}}):
        with pytest.raises(UserError, match=r"^a\.yaml has a key .*, which is not a string\.$"):
            check_plain(mapping, "a.yaml")
