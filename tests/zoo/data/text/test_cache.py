"""The cache of prepared data."""

from pathlib import Path

import pytest

from zoo.data.text.cache import build_once
from zoo.data.text.progress import Progress


def test_only_its_own_temporary_folder_is_removed(tmp_path: Path):
    for name in (".corpus.partial", ".corpus.backup", ".corpus.of-2024.mine"):
        (tmp_path / name).mkdir()
    (tmp_path / ".corpus.partial" / "stale").touch()
    build_once(tmp_path / "corpus", lambda folder: (folder / "file").touch())
    names = {path.name for path in tmp_path.iterdir()} - {"corpus.lock"}
    assert names == {"corpus", ".corpus.backup", ".corpus.of-2024.mine"}
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["file"]


def test_a_failure_leaves_no_folder(tmp_path: Path):
    with pytest.raises(ZeroDivisionError):
        build_once(tmp_path / "corpus", lambda folder: 1 // 0)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.lock"]


def test_tokenising_again_removes_only_token_files(tmp_path: Path):
    for name in ("train-00000.bin", "validation.starts.bin", "progress.json", "notes.txt", "train-old.bin"):
        (tmp_path / name).write_text("x")
    Progress(tmp_path, "digest", "<u2", None, ("train", "validation"))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"notes.txt", "train-old.bin", "train.starts.bin", "validation.starts.bin"}
