from pathlib import Path

import pytest

from zoo.data import Corpus, Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """A small one, and a larger one that starts documents with a token."""
    corpus = Corpus("embedded:documentation", max_characters=200_000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_CACHE", str(tmp_path_factory.mktemp("tokenizers")))
        return {"small": train_tokenizer(corpus, 400), "large": train_tokenizer(corpus, 3000, bos_token="<eos>")}


@pytest.fixture(params=["small", "large"])
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """Each of the tokenizers."""
    return tokenizers[request.param]


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """Text of a user's own."""
    file = tmp_path / "stories.txt"
    file.write_text(" ".join(f"The {i}th day was as long as the one before, and nobody came." for i in range(300)))
    return file
