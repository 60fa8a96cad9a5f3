"""Launches that are known to be compiled to wrong code on Hopper are not in the table."""

import pytest

from kernels.gpu.device import HOPPER, OTHER
from kernels.gpu.launch_table import TABLE, LaunchConfig
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


def made(numbers: dict[str, int]) -> dict[str, int]:
    """An entry with these numbers."""
    return {name: numbers.get(name, 64 if name in ("block", "keys", "values") else 2) for name in LaunchConfig._fields}


@pytest.mark.parametrize("known", OF_LAUNCHES, ids=lambda known: known.says)
def test_each_is_recognised_on_hopper_alone(known):
    assert known.kernels
    assert set(known.kernels) <= set(TABLE)
    for kernel in known.kernels:
        entry = made(known.numbers)
        assert miscompiled(kernel, entry, HOPPER) is not None
        assert miscompiled(kernel, entry, OTHER) is None
        for name in known.numbers:
            assert not known.is_of(kernel, {**entry, name: 1 << 10})


def test_what_a_version_is_known_for():
    says = " ".join(each.says for each in known_of("3.6.0"))
    assert "FLA #640" in says
    assert "triton #11366" in says
    assert len(known_of("3.7.1")) == 2
    assert known_of("3.3.1") == []
