"""Files are on the disk before anything names them: a power cut leaves the old state or the new one."""

import os
import stat
from pathlib import Path

import pytest

from zoo.data.text.progress import AppendedFile
from zoo.evaluation.record import Records
from zoo.files.atomic import sync_all


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names and sizes of the files that are synced, in order; a folder has the size −1."""
    done, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        status = os.fstat(descriptor)
        done.append(
            (Path(f"/proc/self/fd/{descriptor}").resolve().name, -1 if stat.S_ISDIR(status.st_mode) else status.st_size)
        )
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return done


def test_every_shard_and_folder_of_a_checkpoint(tmp_path: Path, synced: list[tuple[str, int]]):
    (tmp_path / "shards" / "deep").mkdir(parents=True)
    (tmp_path / "shards" / "a.pt").write_bytes(b"abc")
    (tmp_path / "shards" / "deep" / "b.pt").write_bytes(b"abcd")
    sync_all(tmp_path / "shards")
    assert sorted(synced) == [("a.pt", 3), ("b.pt", 4), ("deep", -1), ("shards", -1)]
    assert synced[-1] == ("shards", -1)


def test_a_row_of_an_evaluation(tmp_path: Path, synced: list[tuple[str, int]]):
    records = Records(tmp_path)
    records.add({"task": "passkey"}, [{"value": 1.0}], {})
    assert synced == [(records.file.name, records.file.stat().st_size)]


def test_tokens_before_the_record_that_counts_them(tmp_path: Path, synced: list[tuple[str, int]]):
    file = AppendedFile(tmp_path / "train-0.bin")
    file.write(b"tokens")
    assert file.record()["bytes"] == 6
    assert synced == [("train-0.bin", 6)]
