import os
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, SoftFileLock

from kernels import UserError
from zoo.files.atomic import atomic_write
from zoo.files.links import check_inside, held_lock, lock_of, open_in_place


@pytest.mark.parametrize("mode", ["a", "ab+", "r+b", "wb"])
def test_a_link_is_not_followed(tmp_path: Path, mode: Any):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to("precious")
    with pytest.raises(UserError, match="link is a symbolic link, and nothing is written through one"):
        open_in_place(tmp_path / "link", mode)
    with pytest.raises(UserError, match="link is a symbolic link"):
        lock_of(tmp_path / "link")
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes with names")
@pytest.mark.parametrize("mode", ["a", "ab+", "r+b", "wb"])
def test_a_pipe_is_refused_without_waiting(tmp_path: Path, mode: Any):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is a pipe"):
        open_in_place(tmp_path / "pipe", mode)


def test_a_file_with_content_is_not_taken_for_a_lock(tmp_path: Path):
    (tmp_path / ".lock").write_text("precious")
    with pytest.raises(UserError, match="lock is not a lock, as it has content; move it, or choose another folder"):
        lock_of(tmp_path / ".lock")
    assert (tmp_path / ".lock").read_text() == "precious"


def test_a_lock_of_a_file_system_without_flock_is_taken_for_a_lock(tmp_path: Path):
    with SoftFileLock(tmp_path / ".lock"):
        assert (tmp_path / ".lock").stat().st_size > 0
        lock_of(tmp_path / ".lock")


def test_files_are_extended(tmp_path: Path):
    for text in ("ä", "b"):
        with open_in_place(tmp_path / "file", "a") as file:
            file.write(text)
    assert (tmp_path / "file").read_bytes() == "äb".encode()
    with pytest.raises(FileNotFoundError):
        open_in_place(tmp_path / "nothing", "r+b")


def test_a_file_takes_the_place_of_a_link(tmp_path: Path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "link").symlink_to("precious")
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "link").is_symlink()


def test_links_that_stay_inside(tmp_path: Path):
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "1", tmp_path / "models--a" / "blobs"
    (snapshot / "deep").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "blob").touch()
    (tmp_path / "else").touch()
    for place in (snapshot / "file", snapshot / "deep" / "file"):
        place.symlink_to(blobs / "blob")
        check_inside(place, snapshot)
        place.unlink()
        place.symlink_to(tmp_path / "else")
        with pytest.raises(UserError, match="a link that leaves its folder"):
            check_inside(place, snapshot)


def test_a_lock_is_held_by_one_process_at_a_time(tmp_path: Path):
    lock = tmp_path / "lock"
    with held_lock(lock, "busy"), pytest.raises(UserError, match="busy"), held_lock(lock, "busy"):
        raise AssertionError("two hold it")
    with held_lock(lock, "busy"):
        pass


def test_a_file_system_without_locks_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(self: FileLock, timeout: float) -> None:
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with held_lock(tmp_path / "lock", "it is busy"):
        pass
    assert "cannot be locked (no locks here); start only one process" in caplog.text
