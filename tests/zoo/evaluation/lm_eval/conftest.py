"""A tiny model with a tokenizer, and documents as lm-eval's data sets have them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mixers import GatedDeltaNet
from tests.zoo.tiny import ByteTokenizer
from zoo.data import Tokenizer, train_tokenizer
from zoo.evaluation.loaded import LoadedModel, Scored
from zoo.lm import LanguageModel, Uniform

TEXTS = ["How do I open a jar? Turn the lid, and do not smash it on the floor. ", "She said hello to the green cat. "]


class Documents:
    """What a tokenizer is trained on."""

    def __iter__(self):
        return iter(TEXTS * 5)

    def signature(self) -> str:
        return "jars"


class Answering:
    """A subject that says what a function makes of its prompts, and remembers what it was asked."""

    name, vocab_size, context_length = "answering", 257, 32

    def __init__(self, answer: Callable[[str], str] = lambda prompt: "") -> None:
        self.tokenizer: Any = Bytes()
        self.answer = answer
        self.prompts: list[str] = []
        self.requests: list[tuple[list[int], list[int]]] = []

    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        texts = [self.tokenizer.decode(list(prompt)) for prompt in prompts]
        self.prompts += texts
        return [self.tokenizer.encode(self.answer(text))[:max_new_tokens] for text in texts]

    def log_likelihoods(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
        self.requests += [(list(context), list(continuation)) for context, continuation in requests]
        return [Scored(-float(len(continuation)), False) for _, continuation in requests]


class Bytes(ByteTokenizer):
    """Bytes, as a tokenizer that can be saved."""

    hash = "bytes"

    def save(self, path: str) -> None: ...


@pytest.fixture(autouse=True)
def harness(oracle: Callable[[str], ModuleType]) -> None:
    """All of these tests need lm-eval."""
    oracle("lm_eval")


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZOO_CACHE", str(tmp_path_factory.mktemp("cache")))
        return train_tokenizer(Documents(), 300)


@pytest.fixture(scope="session")
def subject(tokenizer: Tokenizer) -> LoadedModel:
    """A random model whose training context is said to be 32 tokens."""
    torch.manual_seed(0)
    model = LanguageModel(Uniform(GatedDeltaNet), tokenizer.vocab_size, hidden_size=32, num_heads=2, num_layers=2)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return LoadedModel("random", model.eval(), tokenizer, context_length=32)


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    """`data("piqa.jsonl", row, …)` writes documents to a folder, and returns the folder."""

    def write(file: str, *rows: dict) -> Path:
        path = tmp_path / "data" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / "data"

    return write
