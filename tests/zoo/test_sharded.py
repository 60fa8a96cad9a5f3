"""Folders of shards: which are used, which are complete."""

from pathlib import Path

import pytest
import torch

from kernels import UserError
from zoo.sharded import check_shards, new_shards, remove_unused_shards, shard_sizes, sync


def shards(folder: Path, step: int) -> str:
    """A folder with two files."""
    name = new_shards(folder, step)
    for part in ("a.pt", "deep/b.pt"):
        (folder / name / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / name / part).write_bytes(b"x" * (10 * step + len(part)))
    return name


def test_a_name_is_not_taken_twice(tmp_path: Path):
    assert [shards(tmp_path, 7) for _ in range(3)] == ["shards-00000007", "shards-00000007-2", "shards-00000007-3"]


def test_what_no_checkpoint_names_is_removed(tmp_path: Path):
    names = [shards(tmp_path, step) for step in (1, 2, 3, 4)]
    torch.save({"shards": {"folder": names[1]}}, tmp_path / "best.ckpt")
    torch.save({"shards": {"folder": names[3]}}, tmp_path / "last.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "whole.ckpt")
    remove_unused_shards(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("shards-*")) == [names[1], names[3]]


def test_nothing_is_removed_while_a_checkpoint_cannot_be_read(tmp_path: Path):
    name = shards(tmp_path, 1)
    (tmp_path / "last.ckpt").write_bytes(b"damaged")
    remove_unused_shards(tmp_path)
    assert (tmp_path / name).is_dir()


def test_files_are_as_long_as_they_were_written(tmp_path: Path):
    name = shards(tmp_path, 1)
    sync(tmp_path / name)
    entry = {"folder": name, "files": shard_sizes(tmp_path / name)}
    assert entry["files"] == {"a.pt": 14, "deep/b.pt": 19}
    path = tmp_path / "last.ckpt"
    check_shards(path, entry)
    (tmp_path / name / "a.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"damaged: .*a.pt has 0 bytes, but was written with 14"):
        check_shards(path, entry)
    (tmp_path / name / "a.pt").unlink()
    with pytest.raises(UserError, match=r"incomplete: .*a.pt is missing"):
        check_shards(path, entry)
    with pytest.raises(UserError, match="which is missing"):
        check_shards(path, {**entry, "folder": "elsewhere"})
