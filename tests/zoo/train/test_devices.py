"""What a device has."""

import sys
from pathlib import Path

import pytest

from zoo.train.devices import free_memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("limit", "expected"), [("3000000\n", 2_000_000), ("max\n", 4096_000), (None, 4096_000)])
def test_free_memory_is_that_of_the_machine_and_the_container(
    limit: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
):
    assert free_memory() > 0
    files = {"/proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 4000 kB\n"}
    if limit is not None:
        files |= {"/sys/fs/cgroup/memory.max": limit, "/sys/fs/cgroup/memory.current": "1000000\n"}

    def read(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert free_memory() == expected
