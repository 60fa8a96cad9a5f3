"""Bits per byte: losses over the same text are comparable between tokenizers, however it is cut into batches."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.data.text.test_public_tokenizers import TEXTS, byte_level, sentencepiece
from tests.zoo.tiny import ByteTokenizer, pretraining, trainer, validation_loader
from zoo.data import MixedText, Source, TextData, Tokenizer, ValidationSet
from zoo.train.module import Pretraining
from zoo.train.optim import Optimisation

TEXT = "".join(f"größe {i}: 字 and 😀, word{i % 7}\n" for i in range(40))


class UniformOverBytes(nn.Module):
    """Knows where documents end, and gives each of 256 bytes the same probability."""

    vocab_size, head = 1000, None

    def __init__(self, bytes_of: Tensor) -> None:
        super().__init__()
        self.bytes_of, self.weight = bytes_of, nn.Parameter(torch.zeros(1))

    def token_losses(self, tokens, labels, cu_seqlens=None):
        losses = self.bytes_of[labels.clamp(min=0)] * math.log(256)
        return losses * (labels >= 0), labels < 0, None


@pytest.fixture
def documents(tmp_path: Path) -> str:
    folder = tmp_path / "documents"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"{i} " + TEXT[i * 11 : i * 30 + 60])
    return str(folder)


@pytest.mark.parametrize("packing", ["windows", "documents", "whole_documents"])
def test_a_distribution_over_bytes_has_the_same_bits_with_any_tokenizer(tmp_path, documents, packing):
    losses = []
    for vocab_size in (257, 290):
        sizes = {
            "sequence_length": 900 if packing == "whole_documents" else 64,
            "batch_size": 3,
            "validation_fraction": 0.4,
        }
        data = TextData(
            documents,
            vocab_size=vocab_size,
            packing=packing,
            validation_sets={"all": ValidationSet(documents)},
            **sizes,
        )
        tokenizer = data.get_tokenizer()
        by_hand = torch.tensor([len(tokenizer.decode([i]).encode()) if i >= 257 else 1 for i in range(vocab_size)])
        by_hand[tokenizer.eos_id] = 0
        module = Pretraining(UniformOverBytes(by_hand), Optimisation(), extra_sets=data.extra_sets)
        metrics = {}
        for row in trainer(tmp_path).validate(module, data, verbose=False):
            metrics |= row
        assert metrics["val_bits_per_byte"] == pytest.approx(8, rel=1e-6)
        losses.append(metrics["val_loss"])
    assert losses[1] > 1.2 * losses[0]


def test_with_bytes_as_tokens_it_is_the_loss_in_bits(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)  # one document, whose end is in the window that is left out
    data = TextData(str(tmp_path / "text.txt"), vocab_size=257, sequence_length=29, batch_size=4)
    (metrics,) = trainer(tmp_path).validate(
        Pretraining(UniformOverBytes(torch.linspace(0, 1, 257)), Optimisation()), data, verbose=False
    )
    assert metrics["val_bits_per_byte"] == pytest.approx(metrics["val_loss"] / math.log(2), rel=1e-6)


@pytest.mark.parametrize("made", [sentencepiece, byte_level])
def test_the_bytes_of_tokens_are_those_of_the_text(made):
    tokenizer = Tokenizer(made())
    sizes = tokenizer.token_bytes()
    assert sizes is not None
    assert sizes[tokenizer.eos_id] == 0
    for text in TEXTS:
        surplus = int(sizes[tokenizer.encode(text)].sum()) - len(text.encode())
        assert surplus == (1 if made is sentencepiece else 0), "the space before a text"


def test_a_mixture_has_that_of_all_sources(tmp_path, documents):
    sources = {"whole": Source(documents), "again": Source(documents)}
    data = MixedText(sources, vocab_size=257, sequence_length=64, batch_size=3, validation_fraction=0.4)
    bytes_of = torch.full((257,), 0.5)
    bytes_of[data.get_tokenizer().eos_id] = 0
    module = Pretraining(UniformOverBytes(bytes_of), Optimisation(), tasks=data.validation_names)
    metrics = {}
    for row in trainer(tmp_path).validate(module, data, verbose=False):
        metrics |= row
    assert metrics["val_bits_per_byte"] == pytest.approx(4, rel=1e-6)


def test_a_tokenizer_that_does_not_count_bytes_leaves_it_out(tmp_path):
    (metrics,) = trainer(tmp_path).validate(pretraining(tokenizer=ByteTokenizer()), validation_loader(), verbose=False)
    assert "val_loss" in metrics
    assert "val_bits_per_byte" not in metrics
