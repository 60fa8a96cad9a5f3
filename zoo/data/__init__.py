"""Text to batches: corpus → tokenizer → shards → windows → loaders, held together by `TextData`."""

from zoo.data.batch import NO_LOSS, Batch
from zoo.data.bigram import interpolated_bigram_loss
from zoo.data.corpus import Corpus
from zoo.data.loader import TrainLoader, ValidationLoader
from zoo.data.module import TextData
from zoo.data.packing import Windows
from zoo.data.shards import Shards, prepare
from zoo.data.tokenizer import Tokenizer, train_tokenizer

__all__ = [
    "NO_LOSS",
    "Batch",
    "Corpus",
    "Shards",
    "TextData",
    "Tokenizer",
    "TrainLoader",
    "ValidationLoader",
    "Windows",
    "interpolated_bigram_loss",
    "prepare",
    "train_tokenizer",
]
