"""Perplexity over the length: what a model gains from a longer context, and whether it survives one."""

import itertools
import math

import torch
from torch import Tensor

from kernels import UserError
from zoo.data.batch import Batch
from zoo.data.text.corpus import Corpus
from zoo.data.text.split import HELD_OUT, held_out_tokens
from zoo.data.text.tokenizer import Tokenizer
from zoo.evaluation.loaded import LoadedModel
from zoo.evaluation.task import Cell, Options, Row, Task

LENGTHS = (256, 512, 1024, 2048)
SAMPLES = 8
FIRST = 64  # upper end of the first range of positions; each further one is twice as long


class Perplexity(Task):
    """Perplexity of held-out text by length and by position.

    The validation split of the text (`haystack`, by default the embedded corpus) is one stream of tokens in which each
    document ends by its end token. The same tokens, `samples` times the greatest length (or all, if fewer), are
    cut into windows of each length. `perplexity` is over all tokens of the windows; `loss` is the mean in nats over
    ranges of positions, each named after its end.

    A model that was trained on other fractions of the same text may have seen some of it.
    """

    name = "perplexity"
    measures = "perplexity of held-out text over the length, and the loss by position"
    needs = "a tokenizer"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.lengths = options.lengths or LENGTHS
        self.corpus = Corpus(options.haystack, key="haystack")
        self._streams: dict[str, Tensor] = {}  # by tokenizer

    @property
    def uses(self) -> tuple[str, ...]:
        return ("haystack", "held_out")

    def cells(self, subject: LoadedModel) -> list[Cell]:
        """One for each length."""
        if subject.tokenizer is None:
            raise UserError(f"{self.name}: {subject.name} was saved without a tokenizer; it cannot read text")
        longest = max(self.lengths)
        size = len(self._stream(subject.tokenizer, (self.options.samples or SAMPLES) * longest + 1))
        if size <= longest:
            raise UserError(
                f"lengths: {longest} tokens are more than the {size} of held-out text in {self.corpus}; name more text "
                "as haystack"
            )
        samples = min(self.options.samples or SAMPLES, (size - 1) // longest)
        share = {} if self.options.held_out is None else {"held_out": self.options.held_out}
        return [{"length": length, "tokens": samples * longest, **share} for length in self.lengths]

    def run(self, subject: LoadedModel, cell: Cell) -> list[Row]:
        """The perplexity of the windows of one length, and their loss by position."""
        assert subject.tokenizer is not None
        length = cell["length"]
        number = cell["tokens"] // length
        stream = self._stream(subject.tokenizer, cell["tokens"] + 1)
        windows = (stream[start : start + number * length].view(number, length) for start in (0, 1))
        batches = zip(*(window.split(max(1, 16_384 // length)) for window in windows), strict=True)
        losses = torch.cat([subject.label_scores(Batch(*batch)).losses for batch in batches]).double()
        each = losses.mean(1)  # of each window
        spread = 1.96 * each.std().item() / math.sqrt(number) if number > 1 else 0.0
        mean = each.mean().item()
        low, value, high = (math.exp(mean + offset) for offset in (-spread, 0, spread))
        overall = {"metric": "perplexity", "value": value, "low": low, "high": high, "count": losses.numel()}
        rows = [cell | overall]
        for start, end in ranges(length):
            part = losses[:, start:end]
            rows.append({**cell, "position": end, "metric": "loss", "value": part.mean().item(), "count": part.numel()})
        return rows

    def _stream(self, tokenizer: Tokenizer, size: int) -> Tensor:
        """The first `size` tokens of the held-out text, or all of them."""
        stream = self._streams.get(tokenizer.hash)
        if stream is None or len(stream) < size:
            share = self.options.held_out or HELD_OUT
            stream = torch.tensor(list(itertools.islice(held_out_tokens(self.corpus, tokenizer, share), size)))
            self._streams[tokenizer.hash] = stream
        return stream[:size]


def ranges(length: int) -> list[tuple[int, int]]:
    """Ranges of positions: up to 64, and then each as long as all before it."""
    ends = [0, *(FIRST << n for n in range(64) if FIRST << n < length), length]
    return list(itertools.pairwise(ends))
