"""Processes that write and read the shards of a checkpoint together: what one of them finds, all of them learn."""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ParallelStrategy

from kernels.errors import UserError
from zoo.checkpoints.archive import save_sealed
from zoo.checkpoints.format import not_written
from zoo.checkpoints.zero_shards import (
    SHARDS,
    check_shards,
    new_shards,
    remove_unused_shards,
    shard_hashes,
    shard_names,
)
from zoo.files.atomic import atomic_write, sync_all


@contextmanager
def noted(failures: list[OSError]) -> Iterator[None]:
    """Append an OSError of the block to `failures` instead of raising it."""
    try:
        yield
    except OSError as error:
        failures.append(error)


def all_succeeded(strategy: ParallelStrategy, path: Path, shards: Path, failures: list[OSError]) -> None:
    """Raise a UserError in all processes, and remove the shards, if one has failures, so that none waits."""
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


def save_with_shards(
    strategy: ParallelStrategy,
    checkpoint: dict[str, Any],
    filepath: Any,
    write: Callable[[Path, Path, list[OSError]], dict[str, Any]],
    left_out: Collection[str],
) -> None:
    """Write the shards of all processes to a new folder, then the checkpoint, without `left_out`, that names it.

    `write(path, folder, failures)` writes the shards of this process, appends what it cannot write, and returns what
    the checkpoint says of the shards in addition to their hashes.

    Raises:
        UserError: A process could not write; in all processes.
    """
    path = Path(strategy.broadcast(str(filepath)))
    name = strategy.broadcast(new_shards(path.parent, checkpoint["global_step"]))
    shards = path.parent / name
    failures: list[OSError] = []
    described: dict[str, Any] = {}
    with noted(failures):
        described = write(path, shards, failures)
    all_succeeded(strategy, path, shards, failures)
    files = hashes_of_all(strategy, shards, failures)
    all_succeeded(strategy, path, shards, failures)
    if strategy.is_global_zero:
        written = {key: checkpoint[key] for key in checkpoint if key not in left_out}
        with noted(failures):
            sync_all(shards)
            with atomic_write(path) as file:
                save_sealed({**written, SHARDS: {"folder": name, "files": files, **described}}, file)
    all_succeeded(strategy, path, shards, failures)
    if strategy.is_global_zero:
        remove_unused_shards(path.parent)


def check_together(strategy: ParallelStrategy, path: Path, shards: Mapping[str, Any], archives: bool = True) -> None:
    """Raise a UserError in all processes, which share the work, if a shard is missing or damaged."""
    problem = None
    try:
        check_shards(path, shards, (strategy.global_rank, strategy.world_size), archives)
    except UserError as error:
        problem = error
    if not strategy.reduce_boolean_decision(problem is None, all=True):
        raise problem or UserError(f"{path} is damaged, as another process found.")
