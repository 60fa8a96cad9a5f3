"""`hashes.json` is checked, and names nothing outside its folder."""

from pathlib import Path

import pytest

from kernels import UserError
from zoo.saved.exported_folder import HASHES as NAME
from zoo.saved.exported_folder import ExportedFiles, hashes


def check_hashes(folder: Path) -> str | None:
    """The signature, after the check of all files."""
    return ExportedFiles(folder).signature


def folder_with(path: Path, **files: bytes) -> Path:
    """A folder with these files and a `hashes.json` of them."""
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    (path / NAME).write_bytes(hashes(files, "signature"))
    return path


def test_files_as_they_were_written_pass(tmp_path: Path):
    folder = folder_with(tmp_path / "folder", weights=b"abc", config=b"")
    assert check_hashes(folder) == "signature"
    (folder / NAME).unlink()
    assert check_hashes(folder) is None


@pytest.mark.parametrize("content", [b"abd", b"ab", b"abcd"])
def test_a_changed_file_is_damaged(content: bytes, tmp_path: Path):
    folder = folder_with(tmp_path / "folder", weights=b"abc")
    (folder / "weights").write_bytes(content)
    with pytest.raises(UserError, match="weights is damaged: its bytes are not those that were exported"):
        check_hashes(folder)
    (folder / "weights").unlink()
    with pytest.raises(UserError, match="folder is incomplete: weights is missing"):
        check_hashes(folder)


@pytest.mark.parametrize("name", ["../x", "inside/x", "/etc/hostname"])
def test_a_file_outside_of_the_folder_is_refused(name: str, tmp_path: Path):
    folder = folder_with(tmp_path / "folder")
    (tmp_path / "x").write_bytes(b"abc")
    (folder / "inside").mkdir()
    (folder / "inside" / "x").write_bytes(b"abc")
    (folder / NAME).write_bytes(hashes({name: b"abc"}, None))
    with pytest.raises(UserError, match=f"hashes.json is refused: {name} is not in its folder"):
        check_hashes(folder)


def test_a_changed_list_is_damaged(tmp_path: Path):
    folder = folder_with(tmp_path / "folder", weights=b"abc")
    text = (folder / NAME).read_text()
    (folder / NAME).write_text(text.replace("weights", "weighty"))
    with pytest.raises(UserError, match=r"hashes.json is damaged"):
        check_hashes(folder)
