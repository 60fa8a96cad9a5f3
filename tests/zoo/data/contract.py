"""Batches of data modules as the devices of a run get them, for tests of the order and of resuming."""

from itertools import chain, islice, repeat
from types import SimpleNamespace
from typing import Any

from zoo.data import Batch
from zoo.data.resumable import ResumableData

Data = ResumableData


def some(data: Data, number: int) -> list[Batch]:
    """The next training batches, over the ends of passes."""
    return list(islice(chain.from_iterable(repeat(data.train_dataloader())), number))


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
