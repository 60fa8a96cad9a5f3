from pathlib import Path

import pytest

from zoo.data import Corpus, Tokenizer, train_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text_folder(tmp_path: Path) -> str:
    """Forty short documents, all different."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(f"document {i}: " + f"word{i} and more words, {i * i}\n" * (3 + i % 7))
    return str(folder)


@pytest.fixture
def tokenizer(text_folder: str) -> Tokenizer:
    """A tokenizer that is trained on these documents."""
    return train_tokenizer(Corpus(text_folder), 300)
