"""The data of a run: text (corpus → tokenizer → shards → windows → loaders) as `TextData`, from several sources as
`MixedText`, and made-up `MQAR` and `MarkovChain`."""

from zoo.data.batch import NO_LOSS, Batch
from zoo.data.bigram import interpolated_bigram_loss
from zoo.data.corpus import Corpus
from zoo.data.loader import TrainLoader, ValidationLoader
from zoo.data.markov import MarkovChain
from zoo.data.mixture import MixedText, Source
from zoo.data.module import TextData
from zoo.data.mqar import MQAR
from zoo.data.packing import Windows
from zoo.data.recall import RecallTask
from zoo.data.shards import Shards, prepare
from zoo.data.tokenizer import Tokenizer, train_tokenizer

__all__ = [
    "MQAR",
    "NO_LOSS",
    "Batch",
    "Corpus",
    "MarkovChain",
    "MixedText",
    "RecallTask",
    "Shards",
    "Source",
    "TextData",
    "Tokenizer",
    "TrainLoader",
    "ValidationLoader",
    "Windows",
    "interpolated_bigram_loss",
    "prepare",
    "train_tokenizer",
]
