"""The cache of prepared data."""

from pathlib import Path

from zoo.data.text.cache import build_once
from zoo.data.text.progress import Progress


def test_only_its_own_temporary_folders_are_removed(tmp_path: Path):
    for name in (".corpus.abcd1234", ".corpus.backup", ".corpus.of-2024.mine"):
        (tmp_path / name).mkdir()
    build_once(tmp_path / "corpus", lambda folder: (folder / "file").touch())
    names = {path.name for path in tmp_path.iterdir()} - {"corpus.lock"}
    assert names == {"corpus", ".corpus.backup", ".corpus.of-2024.mine"}


def test_tokenising_again_removes_only_token_files(tmp_path: Path):
    for name in ("train-00000.bin", "validation.starts.bin", "progress.json", "notes.txt", "train-old.bin"):
        (tmp_path / name).write_text("x")
    Progress(tmp_path, "digest", "<u2", None)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"notes.txt", "train-old.bin", "train.starts.bin", "validation.starts.bin"}
