"""Processes that write and read the shards of a checkpoint together: what one of them finds, all of them learn."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy

from kernels.errors import UserError
from zoo.checkpoints.archive import save_sealed
from zoo.checkpoints.io import not_written
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


def all_succeeded(path: Path, failures: list[OSError], group: dist.ProcessGroup | None = None) -> None:
    """Raise a UserError in all processes, and remove unused shards, if one has failures, so that none waits."""
    if all(of_all(not failures, group)):
        return
    if dist.get_rank() == 0:
        # those that a renamed checkpoint names stay, even if syncing its folder failed
        remove_unused_shards(path.parent)
    raise not_written(path, failures[0] if failures else OSError("another process could not write its part"))


def _hashes_of_all(shards: Path, failures: list[OSError], group: dist.ProcessGroup | None) -> dict[str, list[Any]]:
    """File name → its size in bytes and its hash; each process hashes some of the files."""
    names = of_all(shard_names(shards), group)[0]
    hashes: dict[str, list[Any]] = {}
    with noted(failures):
        hashes = shard_hashes(shards, names[dist.get_rank() :: dist.get_world_size()])
    return {name: described for part in of_all(hashes, group) for name, described in part.items()}


def of_all(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all processes, in their order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def save_with_shards(
    checkpoint: dict[str, Any],
    filepath: Any,
    write: Callable[[Path, Path, list[OSError]], dict[str, Any]],
    left_out: Collection[str],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write the shards of all processes to a new folder, then the checkpoint, without `left_out`, that names it.

    `write(path, folder, failures)` writes the shards of this process, appends what it cannot write, and returns what
    the checkpoint says of the shards in addition to their hashes. A thread needs a `group` of all processes that no
    other thread uses.

    Raises:
        UserError: A process could not write; in all processes.
    """
    path = Path(of_all(str(filepath), group)[0])
    name = of_all(new_shards(path.parent, checkpoint["global_step"]), group)[0]
    shards = path.parent / name
    failures: list[OSError] = []
    described: dict[str, Any] = {}
    with noted(failures):
        described = write(path, shards, failures)
    all_succeeded(path, failures, group)
    files = _hashes_of_all(shards, failures, group)
    all_succeeded(path, failures, group)
    if dist.get_rank() == 0:
        written = {key: checkpoint[key] for key in checkpoint if key not in left_out}
        with noted(failures):
            sync_all(shards)
            with atomic_write(path) as file:
                save_sealed({**written, SHARDS: {"folder": name, "files": files, **described}}, file)
    all_succeeded(path, failures, group)
    if dist.get_rank() == 0:
        remove_unused_shards(path.parent)


def check_together(strategy: ParallelStrategy, path: Path, shards: Mapping[str, Any]) -> None:
    """Raise a UserError in all processes, which share the work, if a shard is missing or damaged."""
    problem = None
    try:
        check_shards(path, shards, (strategy.global_rank, strategy.world_size))
    except UserError as error:
        problem = error
    if not strategy.reduce_boolean_decision(problem is None, all=True):
        raise problem or UserError(f"{path} is damaged, as another process found.")
