"""The data of a run: `TextData` (corpus → tokenizer → token shards → windows → loaders), `MixedText` from several
sources, synthetic `MQAR`, `TokenTasks` and `MarkovChain`; and to classify, `Images` and synthetic `ListOps`."""

from zoo.data.batch import NO_LOSS, Batch
from zoo.data.contract import as_batch
from zoo.data.image.digits import Digits
from zoo.data.image.images import Images
from zoo.data.loader import TrainLoader, ValidationLoader
from zoo.data.synthetic.associative import CompositionalRecall, ForgettingRecall, StackedRecall
from zoo.data.synthetic.listops import ListOps
from zoo.data.synthetic.mad import Compression, InContextRecall, Memorization, SelectiveCopy
from zoo.data.synthetic.markov import MarkovChain
from zoo.data.synthetic.mqar import MQAR
from zoo.data.synthetic.recall import RecallTask
from zoo.data.synthetic.token_tasks import Seeds, TokenSamples, TokenTask, TokenTasks
from zoo.data.text.bigram import interpolated_bigram_loss
from zoo.data.text.corpus import Corpus
from zoo.data.text.mixed_text import MixedText, Source
from zoo.data.text.packing import Windows
from zoo.data.text.shards import Shards, prepare
from zoo.data.text.text_data import TextData
from zoo.data.text.tokenised_text import ValidationSet
from zoo.data.text.tokenizer import Tokenizer, train_tokenizer

__all__ = [
    "MQAR",
    "NO_LOSS",
    "Batch",
    "CompositionalRecall",
    "Compression",
    "Corpus",
    "Digits",
    "ForgettingRecall",
    "Images",
    "InContextRecall",
    "ListOps",
    "MarkovChain",
    "Memorization",
    "MixedText",
    "RecallTask",
    "Seeds",
    "SelectiveCopy",
    "Shards",
    "Source",
    "StackedRecall",
    "TextData",
    "TokenSamples",
    "TokenTask",
    "TokenTasks",
    "Tokenizer",
    "TrainLoader",
    "ValidationLoader",
    "ValidationSet",
    "Windows",
    "as_batch",
    "interpolated_bigram_loss",
    "prepare",
    "train_tokenizer",
]
