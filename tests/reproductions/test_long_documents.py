"""`reproductions/long_documents.py`: documents that a run holds out, of exactly the same number of tokens."""

import json
import lzma
import random
import sys
from pathlib import Path

import pytest

from reproductions import long_documents
from zoo.data.text.corpus import Corpus
from zoo.data.text.split import held_out_tokens
from zoo.data.text.tokenizer import train_tokenizer

LENGTH = 200


def test_long_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    rng = random.Random(0)
    texts = {
        kind: [" ".join(f"{kind}{rng.randrange(1000)}" for _ in range(rng.choice([20, 200]))) for _ in range(40)]
        for kind in long_documents.KINDS
    }
    for kind, documents in texts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
        (tmp_path / f"train-{kind}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    tokenizer = train_tokenizer(Corpus(str(tmp_path / "train-prose.jsonl.xz")), 400)
    tokenizer.save(tmp_path / "tokenizer.json")
    options = [f"--tokens={LENGTH}", "--fraction=0.5"]
    monkeypatch.setattr(sys, "argv", ["long_documents.py", str(tmp_path), *options])
    long_documents.main()
    assert "documents of 200 tokens" in capsys.readouterr().out
    for kind, documents in texts.items():
        pieces = [*Corpus(str(tmp_path / f"long-{kind}.jsonl.xz")).texts()][:-1]
        assert 2 < len(pieces) < 20  # half of those that are long, which are half of all
        stream = [*held_out_tokens(Corpus(str(tmp_path / f"long-{kind}.jsonl.xz")), tokenizer, 1.0)]
        ends = [i for i, token in enumerate(stream) if token == tokenizer.eos_id]
        assert ends[:-1] == [LENGTH * (i + 1) - 1 for i in range(len(pieces))]
        assert len(stream) > LENGTH * len(pieces)
        training = Corpus([str(tmp_path / f"train-{name}.jsonl.xz") for name in long_documents.KINDS])
        held_out = tokenizer.decode(held_out_tokens(training, tokenizer, 0.5))
        assert all(piece in held_out for piece in pieces)
        assert all(any(piece in text for text in documents) for piece in pieces)
