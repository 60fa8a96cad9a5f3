import json
import pickle
from pathlib import Path

import pytest

from kernels.errors import UserError
from zoo.data import Corpus, Tokenizer, train_tokenizer

CORPUS = Corpus(max_characters=100_000)
TEXTS = ["", " a", "def f(x):\n\treturn x\r\n", "é😀\u2028\0 end ", "not the end: <eos> </s>"]


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer(CORPUS, 300)


def test_round_trip_is_exact(tokenizer: Tokenizer):
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == ids
        assert tokenizer.eos_id not in ids  # not even where a text spells it
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode([tokenizer.eos_id]) == "<eos>"


def test_training_is_deterministic(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "another"))
    assert train_tokenizer(CORPUS, 300).hash == tokenizer.hash
    assert train_tokenizer(CORPUS, 301).hash != tokenizer.hash


def test_training_happens_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("zoo.data.text.tokenizer._train", None)
    assert train_tokenizer(CORPUS, 300).hash == tokenizer.hash


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.from_file(path)
        assert (loaded.hash, loaded.encode(TEXTS[2])) == (tokenizer.hash, tokenizer.encode(TEXTS[2]))
    assert pickle.loads(pickle.dumps(tokenizer)).hash == tokenizer.hash


def test_settings_of_a_file_that_would_lose_text_are_off(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert Tokenizer.from_file(tmp_path).encode(TEXTS[2]) == tokenizer.encode(TEXTS[2])


def test_end_token_of_a_loaded_tokenizer(tokenizer: Tokenizer, tmp_path: Path):
    file = tmp_path / "tokenizer.json"
    tokenizer.save(file)
    content = file.read_text()
    file.write_text(content.replace("<eos>", "<|endoftext|>"))
    assert Tokenizer.from_file(file).eos_id == tokenizer.eos_id
    file.write_text(content.replace("<eos>", "<end>"))
    with pytest.raises(UserError, match=r"tokenizer\.json has no end-of-document token; one of <eos>, </s>"):
        Tokenizer.from_file(file)


def test_errors(tmp_path: Path):
    with pytest.raises(UserError, match=r"data\.vocab_size is 256; a byte-level tokenizer needs at least 257"):
        train_tokenizer(CORPUS, 256)
    with pytest.raises(UserError, match=r"data\.vocab_size is 99999999999; it can be at most 10,000,000\."):
        train_tokenizer(CORPUS, 99_999_999_999)  # for which the library aborted the process
    with pytest.raises(UserError, match=r"data\.tokenizer: .*tokenizer\.json does not exist"):
        Tokenizer.from_file(tmp_path)
