"""Launches that are known to be compiled to wrong code on Hopper are in no table, no file, and no choice of `tune`."""

import json
from pathlib import Path

import pytest

from kernels import UserError
from kernels.gpu import launch_file
from kernels.gpu.device import HOPPER, OTHER
from kernels.gpu.launch_file import KERNELS
from kernels.gpu.launch_table import TABLE
from kernels.gpu.miscompilations import KNOWN, known_of, miscompiled

ENTRIES = [
    (kernel, capability, size, entry._asdict())
    for kernel, entries in TABLE.items()
    for (capability, size, _), entry in entries.items()
]
OF_LAUNCHES = [known for known in KNOWN if known.numbers]


@pytest.mark.parametrize(("kernel", "capability", "size", "entry"), ENTRIES)
def test_no_table_has_one(kernel: str, capability: int, size: int, entry: dict[str, int]):
    assert miscompiled(kernel, entry, capability) is None


def made(kernel: str, numbers: dict[str, int]) -> dict[str, int]:
    """An entry for a kernel with these numbers."""
    return {name: numbers.get(name, 64 if name in ("block", "keys", "values") else 2) for name in KERNELS[kernel]}


@pytest.mark.parametrize("known", OF_LAUNCHES, ids=lambda known: known.says)
def test_each_is_recognised_on_hopper_alone(known):
    assert known.kernels
    assert set(known.kernels) <= set(KERNELS)
    for kernel in known.kernels:
        entry = made(kernel, known.numbers)
        assert miscompiled(kernel, entry, HOPPER) is not None
        assert miscompiled(kernel, entry, OTHER) is None
        for name in known.numbers:
            assert not known.is_of(kernel, {**entry, name: 1 << 10})


@pytest.mark.parametrize("known", OF_LAUNCHES, ids=lambda known: known.says)
def test_a_launch_file_with_one_is_refused(known, tmp_path: Path):
    kernel = known.kernels[0]
    entry = {"kernel": kernel, "size": 128, "itemsize": 2, **made(kernel, known.numbers)}
    for capability, refused in (([9, 0], True), ([8, 0], False)):
        path = tmp_path / f"{capability[0]}.json"
        path.write_text(json.dumps({"capability": capability, "entries": [entry]}))
        if not refused:
            assert launch_file.read(str(path)).entries
            continue
        with pytest.raises(UserError, match=rf"^ZOO_LAUNCH: .*: entry 0: {kernel} is wrong on Hopper: ") as caught:
            launch_file.read(str(path))
        assert "\n" not in str(caught.value)


def test_what_a_version_is_known_for():
    says = " ".join(each.says for each in known_of("3.6.0"))
    assert "FLA #640" in says
    assert "triton #11366" in says
    assert len(known_of("3.7.1")) == 2
    assert known_of("3.3.1") == []
