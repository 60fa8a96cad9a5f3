"""Processes that write and read the shards of a checkpoint together: what one of them finds, all of them learn."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy

from kernels.errors import UserError
from zoo.checkpoints.format import not_written
from zoo.checkpoints.zero_shards import check_shards, shard_hashes, shard_names


@contextmanager
def noted(failures: list[OSError]) -> Iterator[None]:
    """Append an OSError of the block to `failures` instead of raising it."""
    try:
        yield
    except OSError as error:
        failures.append(error)


def all_succeeded(strategy: ParallelStrategy, path: Path, shards: Path, failures: list[OSError]) -> None:
    """Raise in all processes if one could not write its shard, so that none is left waiting.

    Args:
        strategy: The strategy of these processes.
        path: The checkpoint.
        shards: The folder of its shards, which is removed then.
        failures: What this process could not write.

    Raises:
        UserError: A process has failures.
    """
    if strategy.reduce_boolean_decision(not failures, all=True):
        return
    if strategy.is_global_zero:
        shutil.rmtree(shards, ignore_errors=True)
    raise not_written(path, failures[0] if failures else OSError("another process could not write its part"))


def hashes_of_all(strategy: ParallelStrategy, shards: Path, failures: list[OSError]) -> dict[str, list[Any]]:
    """File name → its size in bytes and its hash; each process hashes some of the files."""
    names = strategy.broadcast(shard_names(shards))
    hashes: dict[str, list[Any]] = {}
    with noted(failures):
        hashes = shard_hashes(shards, names[strategy.global_rank :: strategy.world_size])
    parts: list[Any] = [None] * strategy.world_size
    torch.distributed.all_gather_object(parts, hashes)
    return {name: described for part in parts for name, described in part.items()}


def check_together(strategy: ParallelStrategy, path: Path, shards: Mapping[str, Any], archives: bool = True) -> None:
    """Raise a UserError in all processes, which share the work, if a shard is missing or damaged."""
    problem = None
    try:
        check_shards(path, shards, (strategy.global_rank, strategy.world_size), archives)
    except UserError as error:
        problem = error
    if not strategy.reduce_boolean_decision(problem is None, all=True):
        raise problem or UserError(f"{path} is damaged, as another process found.")
