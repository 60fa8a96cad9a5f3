"""Writers of the same file, at once and one after another's end."""

import os
import signal
import stat
import threading
import time
from pathlib import Path

import pytest

from zoo.files.atomic import atomic_link, atomic_write


def partials(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".partial"))


def test_of_two_writers_at_once_one_wins_whole(tmp_path: Path):
    path, both = tmp_path / "last.ckpt", threading.Barrier(2)

    def write(part: bytes) -> None:
        with atomic_write(path) as file:
            for _ in range(100):
                file.write(part * 1000)
                both.wait()

    threads = [threading.Thread(target=write, args=(part,)) for part in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in (b"a" * 100_000, b"b" * 100_000)
    assert partials(tmp_path) == []


def killed_while_writing(path: Path) -> None:
    """What a process does that a signal ends in the middle."""
    process = os.fork()
    if process == 0:
        with atomic_write(path) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(process, 0)


@pytest.mark.skipif(os.name == "nt", reason="no fork")
@pytest.mark.parametrize("again", ["write", "link"])
def test_what_a_killed_process_left_is_removed(tmp_path: Path, again: str):
    path = tmp_path / "last.ckpt"
    path.write_bytes(b"before")
    killed_while_writing(path)
    assert path.read_bytes() == b"before"
    assert len(partials(tmp_path)) == 1
    if again == "write":
        with atomic_write(path) as file:
            file.write(b"after")
    else:
        (tmp_path / "other").write_bytes(b"after")
        atomic_link(tmp_path / "other", path)
    assert path.read_bytes() == b"after"
    assert partials(tmp_path) == []


def test_another_machines_file_is_removed_when_nobody_writes_to_it_any_more(tmp_path: Path):
    path = tmp_path / "last.ckpt"
    ages = {1: 0, 2: 30 * 60, 3: 2 * 60 * 60}  # seconds by process; writing a large file may take half an hour
    for process, age in ages.items():
        partial = tmp_path / f".last.ckpt.elsewhere.{process}.1.partial"
        partial.write_bytes(b"half")
        os.utime(partial, (time.time() - age,) * 2)
    with atomic_write(path) as file:
        file.write(b"whole")
    assert partials(tmp_path) == [f".last.ckpt.elsewhere.{process}.1.partial" for process in (1, 2)]


@pytest.mark.parametrize("name", ["write", "link"])
def test_what_is_renamed_is_on_the_disk_before_and_the_name_after(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise a power cut leaves an empty file under the new name, or the old file after success was reported."""
    (tmp_path / "other").write_bytes(b"whole")
    path, done, replace, fsync = tmp_path / "last.ckpt", [], os.replace, os.fsync

    def noted_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        done.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)
        fsync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    if name == "write":
        with atomic_write(path) as file:
            file.write(b"whole")
        assert done == [5, "rename", "folder"]
    else:
        atomic_link(tmp_path / "other", path)
        assert done == ["rename", "folder"]


def test_a_users_file_with_a_similar_name_is_left_alone(tmp_path: Path):
    names = [".last.ckpt.backup.partial", ".last.ckpt.elsewhere.1.partial", ".last.ckpt.of.2024.mine.partial"]
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
        os.utime(tmp_path / name, (time.time() - 7200,) * 2)
    with atomic_write(tmp_path / "last.ckpt") as file:
        file.write(b"whole")
    assert partials(tmp_path) == sorted(names)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_an_interrupted_write_leaves_the_old_file_alone(error: type[BaseException], tmp_path: Path):
    (tmp_path / "last.ckpt").write_bytes(b"before")

    def interrupted() -> None:
        with atomic_write(tmp_path / "last.ckpt") as file:
            file.write(b"half")
            raise error("stop")

    with pytest.raises(error, match="stop"):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
    assert (tmp_path / "last.ckpt").read_bytes() == b"before"


def test_a_file_linked_to_itself_leaves_nothing(tmp_path: Path):
    (tmp_path / "last.ckpt").write_bytes(b"x")
    for _ in range(2):
        atomic_link(tmp_path / "last.ckpt", tmp_path / "best.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]
