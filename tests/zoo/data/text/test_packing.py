import numpy as np
import pytest

from kernels.errors import UserError
from zoo.data import Corpus, Shards, Windows, prepare, train_tokenizer


@pytest.fixture
def shards(text_folder: str) -> Shards:
    corpus = Corpus(text_folder)
    return Shards(prepare(corpus, train_tokenizer(corpus, 300), 0.2, 1), "train")


@pytest.mark.parametrize("length", [1, 7, 64])
def test_windows(shards: Shards, length: int):
    tokens = shards.read(0, len(shards)).tolist()
    windows = Windows(shards, length)
    assert len(windows) == (len(tokens) - 1) // length
    batch = windows.collate([windows[i] for i in (2, 0, len(windows) - 1)])
    assert batch.cu_seqlens is None
    assert batch.tokens.shape == batch.labels.shape == (3, length)
    for row, i in enumerate((2, 0, len(windows) - 1)):
        assert batch.tokens[row].tolist() == tokens[i * length : (i + 1) * length]
        assert batch.labels[row].tolist() == tokens[i * length + 1 : (i + 1) * length + 1]


@pytest.mark.parametrize("length", [1, 7, 64, 1000])
def test_documents_against_a_loop(shards: Shards, length: int):
    tokens = shards.read(0, len(shards)).tolist()
    starts = set(shards.document_starts.tolist())
    windows = Windows(shards, length, "documents")
    chosen = [3 % len(windows), *range(len(windows))]  # all: few of them end with a document
    batch = windows.collate([windows[i] for i in chosen])
    expected_tokens, expected_labels, bounds = [], [], []
    for i in chosen:
        for t in range(i * length, (i + 1) * length):
            if t == i * length or t in starts:
                bounds.append(len(expected_tokens))
            expected_tokens.append(tokens[t])
            expected_labels.append(-100 if t + 1 in starts else tokens[t + 1])
    assert batch.tokens.tolist() == [expected_tokens]
    assert batch.labels.tolist() == [expected_labels]
    assert batch.cu_seqlens.tolist() == [*bounds, len(chosen) * length]
    assert batch.cu_seqlens.numpy().dtype == np.int32


def test_too_short(shards: Shards):
    n = len(shards)
    assert len(Windows(shards, n - 1)) == 1
    with pytest.raises(UserError, match=rf"data\.sequence_length is {n}, but the train split has {n} tokens"):
        Windows(shards, n)
    with pytest.raises(
        UserError, match=r"data\.packing is 'docs'; it must be one of windows, documents, whole_documents"
    ):
        Windows(shards, 4, "docs")
