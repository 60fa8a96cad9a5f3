from pathlib import Path

import pytest

import mixers

FILE = Path(__file__).with_name("outsider.py")


@pytest.fixture
def outsider(monkeypatch: pytest.MonkeyPatch) -> type[mixers.TokenMixer]:
    monkeypatch.syspath_prepend(FILE.parent)
    return mixers.get("outsider.Outsider")


def test_it_passes_the_contract(outsider: type[mixers.TokenMixer]):
    passed = mixers.check_mixer(outsider)
    # expanded too, though it has never heard of expansion
    assert {name.partition(": ")[0] for name in passed if ": " in name} == {
        "expanded with subheads",
        "expanded without subheads",
    }


def test_it_is_small_and_unknown():
    code = [line for line in FILE.read_text().splitlines() if line.strip() and not line.strip().startswith('"""')]
    assert len(code) < 40
    assert "Outsider" not in mixers.names()
