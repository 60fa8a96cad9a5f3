"""The stream of tokens whose perplexity is measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from zoo.data import Batch, Tokenizer
from zoo.evaluation.task import Options
from zoo.evaluation.tasks.perplexity import Perplexity


class Listener:
    """A subject that keeps what it is asked, and is equally surprised by every token."""

    name = "listener"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.batches: list[Batch] = []

    def label_scores(self, batch: Batch) -> SimpleNamespace:
        self.batches.append(batch)
        return SimpleNamespace(losses=torch.full(batch.labels.shape, 2.0))


def cut(stream: Sequence[int], end: int) -> list[list[int]]:
    """The documents of a stream, each with its end token, which may be what the next one starts with, too."""
    documents: list[list[int]] = [[]]
    for token in stream:
        documents[-1].append(token)
        if token == end and len(documents[-1]) > 1:
            documents.append([])
    return documents


def test_all_of_a_text_that_no_model_has_read(tmp_path: Path, tokenizer: Tokenizer):
    texts = [f"Story {i} is told in {i * i} words." for i in range(40)]
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = Options(lengths=(16,), samples=1000, haystack=str(tmp_path / "held_out.jsonl"), held_out=1.0)
    task, subject = Perplexity(options), Listener(tokenizer)
    (cell,) = task.cells(subject)
    task.run(subject, cell)
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    stream = [i for text in texts for i in (*start, *tokenizer.encode(text), tokenizer.eos_id)]
    assert torch.cat([batch.tokens.flatten() for batch in subject.batches]).tolist() == stream[: cell["tokens"]]
    assert len(stream) - cell["tokens"] <= 16
    assert cell["held_out"] == 1.0


def test_every_document_of_the_stream_ends_by_its_end_token(tmp_path: Path, tokenizer: Tokenizer):
    texts = [f"Story {i} is told in so many words as there are days, {i * i}." for i in range(200)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    task, subject = Perplexity(Options(lengths=(64, 128), samples=3, haystack=str(tmp_path))), Listener(tokenizer)
    rows = [task.run(subject, cell)[0] for cell in task.cells(subject)]
    assert [row["value"] for row in rows] == [torch.tensor(2.0).double().exp().item()] * 2
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    sequences = [[*start, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    for batch in subject.batches:
        stream: Tensor = torch.cat([batch.tokens.flatten(), batch.labels.flatten()[-1:]])
        assert torch.equal(batch.tokens.flatten()[1:], batch.labels.flatten()[:-1])
        *whole, last = cut(stream.tolist(), tokenizer.eos_id)
        assert len(whole) > 2
        assert all(document in sequences for document in whole)
        assert any(document[: len(last)] == last for document in sequences)
