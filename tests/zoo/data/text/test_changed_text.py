"""Text that changes is tokenised again, whatever its size and times say."""

import os
import time
from pathlib import Path

import pytest

from tests.commands import FIT, Command
from zoo.files.sealed_json import read_sealed


@pytest.mark.slow
def test_text_that_changes_while_size_and_time_stay(command: Command, desk: Path):
    file = desk / "notes.txt"
    hashes = []
    for word in ("apple", "grape"):
        file.write_text(f"an {word} a day keeps all others away\n" * 500)
        os.utime(file, (1_700_000_000, 1_700_000_000))
        fit = (*FIT, "--data.path=notes.txt", "--trainer.max_steps=1", "--run", word)
        command(*fit).ok()
        hashes.append(read_sealed(desk / "runs" / word / "results.json")["data_hash"])
        time.sleep(0.02)
    assert hashes[0] != hashes[1]
