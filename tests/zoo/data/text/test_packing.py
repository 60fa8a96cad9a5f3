from itertools import pairwise

import numpy as np
import pytest

from kernels.errors import UserError
from tests.zoo.data.contract import documents
from zoo.data import NO_LOSS, Corpus, Shards, Tokenizer, Windows, prepare
from zoo.data.text.packing import samples_of


@pytest.fixture
def shards(text_folder: str, tokenizer: Tokenizer) -> Shards:
    return Shards(prepare(Corpus(text_folder), tokenizer, 0.2, 1), "train")


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


def test_whole_documents_are_never_cut(shards: Shards, caplog: pytest.LogCaptureFixture):
    everything = [*documents(shards)]
    length = sorted(map(len, everything))[-2]  # all but the longest fit
    fitting = [document for document in everything if len(document) <= length]
    rows = samples_of(shards, length, "whole_documents")
    longer = len(everything) - len(fitting)
    assert f"{longer} of {len(everything)} documents of the train split are longer" in caplog.text
    seen = []
    for sample in map(rows.__getitem__, range(len(rows))):
        assert sample.tokens.shape == sample.labels.shape == (length,)
        for start, end in pairwise([*sample.starts.tolist(), length]):
            tokens, labels = sample.tokens[start:end].tolist(), sample.labels[start:end].tolist()
            if set(labels) == {NO_LOSS} and set(tokens) == {0}:  # padding
                continue
            assert labels == [*tokens[1:], NO_LOSS]
            seen.append(tokens)
    assert seen == fitting
    batch = rows.batch([0, 1])
    assert batch.tokens.shape == (1, 2 * length)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist()[-1] == 2 * length
    with pytest.raises(UserError, match=r"is 1, but the train split has no document that is as short: raise it, add"):
        samples_of(shards, 1, "whole_documents")
