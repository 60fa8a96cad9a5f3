"""The data of a run: `TextData` (corpus → tokenizer → token shards → windows → loaders), `MixedText` from several
sources, synthetic `MQAR`, `TokenTasks` and `MarkovChain`; and to classify, `Images`."""

# ruff: noqa: F401 (type checkers see the imports, `__getattr__` makes them)

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zoo.data.batch import NO_LOSS, Batch
    from zoo.data.contract import as_batch
    from zoo.data.image.images import Digits, Images
    from zoo.data.loader import TrainLoader, ValidationLoader
    from zoo.data.synthetic.markov import MarkovChain
    from zoo.data.synthetic.mqar import MQAR
    from zoo.data.synthetic.recall import RecallTask
    from zoo.data.synthetic.task import Seeds, TokenSamples, TokenTask
    from zoo.data.synthetic.token_tasks import TokenTasks
    from zoo.data.synthetic.word_problem import WordProblem
    from zoo.data.text.bigram import interpolated_bigram_loss
    from zoo.data.text.corpus import Corpus
    from zoo.data.text.mixed_text import MixedText, Source
    from zoo.data.text.packing import Windows
    from zoo.data.text.shards import Shards, prepare
    from zoo.data.text.text_data import TextData
    from zoo.data.text.tokenised_text import ValidationSet
    from zoo.data.text.tokenizer import Tokenizer, train_tokenizer

# module → names that are imported from it when they are first used, since data modules derive from Lightning's
_LAZY = {
    "batch": "NO_LOSS Batch",
    "contract": "as_batch",
    "image.images": "Digits Images",
    "loader": "TrainLoader ValidationLoader",
    "synthetic.markov": "MarkovChain",
    "synthetic.mqar": "MQAR",
    "synthetic.recall": "RecallTask",
    "synthetic.task": "Seeds TokenSamples TokenTask",
    "synthetic.token_tasks": "TokenTasks",
    "synthetic.word_problem": "WordProblem",
    "text.bigram": "interpolated_bigram_loss",
    "text.corpus": "Corpus",
    "text.mixed_text": "MixedText Source",
    "text.packing": "Windows",
    "text.shards": "Shards prepare",
    "text.text_data": "TextData",
    "text.tokenised_text": "ValidationSet",
    "text.tokenizer": "Tokenizer train_tokenizer",
}
_MODULES = {name: module for module, names in _LAZY.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
