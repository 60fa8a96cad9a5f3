"""JSON files with a hash of their own content."""

import json
from pathlib import Path

import pytest

from kernels.errors import UserError
from zoo.files.sealed_json import SEAL, read_sealed, sealed, unsealed, write_sealed

CONTENT = {"loss": 2.5, "none": None, "nested": {"10": [1, 2], "9": "é"}, "infinite": float("inf"), "steps": 4}


def test_content_comes_back_and_others_can_read_it(tmp_path: Path):
    file = tmp_path / "new folder" / "a.json"
    write_sealed(file, {**CONTENT, "nested": {10: (1, 2), 9: "é"}})
    assert read_sealed(file) == CONTENT
    plain = json.loads(file.read_text())
    assert list(plain) == [*CONTENT, SEAL]
    file.write_text(json.dumps(plain, sort_keys=True))  # laid out in another way by an editor
    assert read_sealed(file) == CONTENT


def test_a_file_without_a_seal(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(CONTENT))
    with pytest.raises(UserError, match=r"a\.json is damaged \(it has lost the hash of its content\); ask\."):
        read_sealed(file, advice="ask")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", r"is damaged \(it is empty\)"),
        (b"\xff", "is damaged .it is not JSON: 'utf-8' codec"),
        (b"[" * 100_000, "is damaged .it is not JSON: "),
        (b'"text"', r"is damaged \(it holds no JSON object\)"),
        (b'{"blake2b": 3}', r"is damaged \(its content does not match its hash\)"),
        (None, r"cannot be read \(No such file or directory\)"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, data: bytes | None, said: str):
    file = tmp_path / "a.json"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(UserError, match=rf"a\.json {said}.*; delete it or restore a copy\.$"):
        read_sealed(file)


def test_no_flipped_bit_and_no_cut_is_believed():
    whole = sealed(CONTENT)
    flips = (whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :] for i in range(len(whole)) for bit in range(8))
    for damaged in (*flips, *(whole[:length] for length in range(len(whole)))):
        try:
            actual = unsealed(damaged, "a.json")
        except UserError:
            continue
        assert actual == CONTENT  # only white space was changed


def test_what_was_there_stays_if_the_new_content_cannot_be_written(tmp_path: Path):
    file = tmp_path / "a.json"
    write_sealed(file, CONTENT)
    with pytest.raises(TypeError, match="object is not JSON serializable"):
        write_sealed(file, {"loss": object()})
    with pytest.raises(ValueError, match="blake2b"):
        write_sealed(file, {SEAL: 1})
    assert read_sealed(file) == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
