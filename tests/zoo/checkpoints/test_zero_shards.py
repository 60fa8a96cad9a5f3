"""Folders of shards: which are used, which are complete, and that they stay where they belong."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import UserError
from zoo.checkpoints.zero_shards import (
    check_entry,
    check_shards,
    new_shards,
    remove_unused_shards,
    shard_hashes,
    shard_names,
)
from zoo.files.atomic import sync_all


def shards(folder: Path, step: int) -> str:
    """A folder with two files."""
    name = new_shards(folder, step)
    for part in ("a.pt", "deep/b.pt"):
        (folder / name / part).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": torch.full((4,), step)}, folder / name / part)
    return name


def entry_of(folder: Path, name: str) -> dict[str, Any]:
    """What a checkpoint says of a folder of shards."""
    files = shard_hashes(folder / name, shard_names(folder / name))
    return {"folder": name, "files": files, "stage": 2, "world_size": 1, "parameters": {}}


def test_a_name_is_not_taken_twice(tmp_path: Path):
    assert [shards(tmp_path, 7) for _ in range(3)] == ["shards-00000007", "shards-00000007-2", "shards-00000007-3"]


def test_what_no_checkpoint_names_is_removed(tmp_path: Path):
    names = [shards(tmp_path, step) for step in (1, 2, 3, 4)]
    torch.save({"shards": {"folder": names[1]}}, tmp_path / "best.ckpt")
    torch.save({"shards": {"folder": names[3]}}, tmp_path / "last.ckpt")
    torch.save({"state_dict": {}}, tmp_path / "whole.ckpt")
    remove_unused_shards(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("shards-*")) == [names[1], names[3]]


def test_folders_with_other_names_are_left_alone(tmp_path: Path):
    name = shards(tmp_path, 1)
    mine = [f"{name}-backup", f"{name}.old", "shards-1", "shards-of-mine", "shards-00000001-2b"]
    for folder in mine:
        (tmp_path / folder).mkdir()
    (tmp_path / "shards-00000009").symlink_to(tmp_path / "shards-of-mine")
    remove_unused_shards(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*mine, "shards-00000009"}


def test_nothing_is_removed_while_a_checkpoint_cannot_be_read(tmp_path: Path):
    name = shards(tmp_path, 1)
    (tmp_path / "last.ckpt").write_bytes(b"damaged")
    remove_unused_shards(tmp_path)
    assert (tmp_path / name).is_dir()


def test_files_are_those_that_were_written(tmp_path: Path):
    name = shards(tmp_path, 1)
    sync_all(tmp_path / name)
    entry, path, file = entry_of(tmp_path, name), tmp_path / "last.ckpt", tmp_path / name / "a.pt"
    sizes = {shard: size for shard, (size, _) in entry["files"].items()}
    assert sorted(sizes) == ["a.pt", "deep/b.pt"]
    check_entry(path, entry)
    check_shards(path, entry)
    with pytest.raises(UserError, match="its entry for shards is not as this project writes it"):
        check_entry(path, {**entry, "files": sizes})
    written = file.read_bytes()
    flipped = bytearray(written)
    flipped[written.index(b"\1\0\0\0\0\0\0\0\1")] ^= 4  # in the tensor
    file.write_bytes(flipped)
    with pytest.raises(UserError, match=r"damaged: .*a.pt does not have the bytes that were written"):
        check_shards(path, entry)
    check_shards(path, entry, (1, 2))  # that part is the other file's
    file.write_bytes(b"")
    with pytest.raises(UserError, match=rf"damaged: .*a.pt has 0 bytes, but was written with {len(written)}"):
        check_shards(path, entry)
    file.unlink()
    with pytest.raises(UserError, match=r"incomplete: .*a.pt is missing"):
        check_shards(path, entry)
    with pytest.raises(UserError, match="which is missing"):
        check_shards(path, {**entry, "folder": "elsewhere"})


@pytest.mark.parametrize("folder", ["../shards-1", "/tmp/shards-1", "shards-1/../..", "..", "", "notes", 3, None])
def test_the_folder_is_beside_the_checkpoint(tmp_path: Path, folder: Any):
    with pytest.raises(UserError, match="is refused"):
        check_entry(tmp_path / "last.ckpt", {**entry_of(tmp_path, shards(tmp_path, 1)), "folder": folder})


@pytest.mark.parametrize("file", ["../a.pt", "/etc/passwd", "deep/../../a.pt", "c:a.pt", "..\\a.pt", 3])
def test_the_files_are_in_the_folder(tmp_path: Path, file: Any):
    with pytest.raises(UserError, match="is refused"):
        check_entry(tmp_path / "last.ckpt", {**entry_of(tmp_path, shards(tmp_path, 1)), "files": {file: [1, "0"]}})


@pytest.mark.skipif(os.name == "nt", reason="links")
def test_links_do_not_leave_the_folder(tmp_path: Path):
    runs = tmp_path / "run"
    name = shards(runs, 1)
    (runs / name / "a.pt").rename(tmp_path / "a.pt")
    (runs / name / "a.pt").symlink_to(tmp_path / "a.pt")
    with pytest.raises(UserError, match="a link that leaves"):
        check_shards(runs / "last.ckpt", entry_of(runs, name))


def test_a_file_that_is_not_listed_is_not_read(tmp_path: Path):
    name = shards(tmp_path, 1)
    entry = entry_of(tmp_path, name)
    (tmp_path / name / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(b"x")
    with pytest.raises(UserError, match="is not one of its shards"):
        check_shards(tmp_path / "last.ckpt", entry)
