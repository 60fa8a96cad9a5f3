"""Batches of data modules as the devices of a run get them, for tests of the order and of resuming."""

from collections.abc import Iterator
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kernels import UserError
from zoo.data import Batch, Corpus, Shards
from zoo.data.resumable import ResumableData

Data = ResumableData


def some(data: Data, number: int) -> list[Batch]:
    """The next training batches, over the ends of passes."""
    return list(islice(chain.from_iterable(repeat(data.train_dataloader())), number))


def documents(shards: Shards) -> Iterator[list[int]]:
    """The tokens of each document."""
    for start, stop in pairwise([*shards.document_starts.tolist(), len(shards)]):
        yield shards.read(start, stop).tolist()


def error_of(path: Path | str | list[str], text_field: str = "text") -> str:
    """The sentence about a corpus that cannot be read."""
    with pytest.raises(UserError) as caught:
        list(Corpus(path if isinstance(path, list) else str(path), text_field))
    message = str(caught.value)
    assert message.startswith(("data.path: ", "data.path is", "data.path="))
    assert "\n" not in message
    return message


def samples_of(batch: Batch) -> list[tuple[list[Any], list[int]]]:
    """The tokens and labels of each sample; packed ones have one label each."""
    if batch.cu_seqlens is None:
        return list(zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True))
    bounds = batch.cu_seqlens.tolist()
    parts = [batch.tokens[0, start:stop].tolist() for start, stop in zip(bounds, bounds[1:], strict=False)]
    return [(tokens, [label]) for tokens, label in zip(parts, batch.labels[0].tolist(), strict=True)]


def on_rank(data: Data, rank: int, ranks: int, position: int = 0) -> Data:
    """The data as one of several devices reads it, from a position on."""
    data.load_state_dict({**data.state_dict(), "position": position})
    run = {"overfit_batches": 0, "accumulate_grad_batches": 1, "lightning_module": None}
    data.trainer = SimpleNamespace(global_rank=rank, world_size=ranks, state=SimpleNamespace(fn=""), **run)
    return data
