"""Sharded checkpoints of FSDP2: a folder in the format of `torch.distributed.checkpoint`, which reshards.

Each process writes its parts of tensors to a separate file. The folder's `.metadata`, which other tools need, is a
pickle that could run code, and is never read here: its contents are also in the sealed `.ckpt`, in plain containers,
under `tensors` in the entry `shards`. Tested with PyTorch 2.13.
"""

import math
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor

from kernels.errors import UserError
from zoo.checkpoints.zero_shards import SHARDS, TENSORS, check_shards

_NAME = re.compile(r"state_dict/[^/]+|optimizer_states/\d+/\d+/[^/]+")


class _Writer(dcp.FileSystemWriter):
    """Keeps the metadata that it writes, in the first process."""

    metadata: Metadata | None = None

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        # PyTorch 2.11 adds these to a copy of the metadata, later versions to the metadata
        places = {result.index: result.storage_data for of_process in results for result in of_process}
        self.metadata = replace(metadata, storage_data=places)


class _Reader(dcp.FileSystemReader):
    """Reads the parts that `tensors` of a checkpoint names, instead of those that the pickle `.metadata` names."""

    def __init__(self, folder: Path, tensors: Mapping[str, Any]) -> None:
        super().__init__(folder)
        self._tensors = tensors

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return _metadata(self._tensors)


def named_tensors(weights: Mapping[str, Tensor], optimizer_states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Name in a sharded checkpoint → tensor, of the weights and of the states of optimisers."""
    named = {f"state_dict/{name}": tensor for name, tensor in weights.items()}
    for number, optimizer in enumerate(optimizer_states):
        for index, values in optimizer["state"].items():
            tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
            named.update({f"optimizer_states/{number}/{index}/{key}": value for key, value in tensors.items()})
    return named


def without_tensors(optimizer_states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states of optimisers without what `named_tensors` takes from them."""
    return [
        {
            **optimizer,
            "state": {
                index: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
                for index, values in optimizer["state"].items()
            },
        }
        for optimizer in optimizer_states
    ]


def with_tensors(checkpoint: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """A checkpoint with tensors of such names where one in one file has them; it is not changed itself."""
    states = [
        {**optimizer, "state": {index: dict(values) for index, values in optimizer["state"].items()}}
        for optimizer in checkpoint.get("optimizer_states", [])
    ]
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match name.split("/"):
            case ["state_dict", weight]:
                weights[weight] = tensor
            case ["optimizer_states", number, index, key]:
                states[int(number)]["state"][int(index)][key] = tensor
    return {**checkpoint, "state_dict": weights, "optimizer_states": states}


def write_tensors(
    folder: Path, tensors: Mapping[str, Tensor], group: torch.distributed.ProcessGroup | None = None
) -> dict[str, Any]:
    """Write the tensors of all processes, each its parts, to a new folder; an OSError in all if one could not write.

    The processes agree over `group`, or over the default group, which only one thread may use at a time.

    Returns:
        In the first process, the entry `tensors`: name → [dtype, shape, parts], a part being [offsets, shape, file,
        first byte, number of bytes]; empty in the others.
    """
    writer = _Writer(folder)
    try:
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)
    except dcp.CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if reason := next((cause for cause in causes if isinstance(cause, OSError)), None):
            raise reason from error
        if all(isinstance(cause, RuntimeError) for cause in causes):  # what PyTorch's writer makes of a full disk
            raise OSError(f"only a part of {folder} could be written; is the disk full?") from error
        raise
    return {} if writer.metadata is None else _plain(writer.metadata)


def read_tensors(path: str | os.PathLike[str], shards: Mapping[str, Any], into: Mapping[str, Tensor]) -> None:
    """Read tensors of a sharded checkpoint, or the parts of them that a process has, in place.

    Args:
        path: The checkpoint.
        shards: Its entry `shards`, checked by `check_entry`, and its files by `check_shards`.
        into: Name → tensor of the same whole shape. If some are of all processes (DTensor), all processes call this.
    """
    alone = not torch.distributed.is_initialized() or not any(isinstance(tensor, DTensor) for tensor in into.values())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load in a single process.*")
            reader = _Reader(Path(path).parent / shards["folder"], shards[TENSORS])
            dcp.load(dict(into), storage_reader=reader, no_dist=alone)
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, UserError):
            raise cause from error
        raise UserError(f"the shards of {path} cannot be read: {' '.join(str(cause).split())}") from error


def whole_checkpoint(path: str | os.PathLike[str], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A sharded checkpoint, checked by `check_entry`, with all tensors on the CPU, as if saved in one file."""
    shards = checkpoint[SHARDS]
    check_shards(path, shards)
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape, _) in shards[TENSORS].items()}
    read_tensors(path, shards, tensors)
    return {key: value for key, value in with_tensors(checkpoint, tensors).items() if key != SHARDS}


def whole_weights(path: str | os.PathLike[str], shards: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights alone; as `whole_checkpoint`."""
    weights = {name: tensor for name, tensor in shards[TENSORS].items() if name.startswith("state_dict/")}
    return whole_checkpoint(path, {SHARDS: {**shards, TENSORS: weights}})["state_dict"]


def check_tensors(path: str | os.PathLike[str], checkpoint: Mapping[str, Any]) -> None:
    """Raise a UserError unless the entry `tensors` in `shards`, checked by `check_entry`, is valid.

    The parts of a tensor must be as large as the tensor together, and no part larger than what its file holds, so that
    reading takes no more memory than the files' size.
    """
    invalid = UserError(f"{path} is refused: its entry for shards is not as this project writes it.")
    shards, states, stored = checkpoint[SHARDS], checkpoint.get("optimizer_states", []), 0
    try:
        for name, (dtype, shape, parts) in shards[TENSORS].items():
            numbers = 0
            for offsets, sizes, file, first, length in parts:
                counts = (*offsets, *sizes, *shape, first, length)
                inside = all(o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
                if any(type(count) is not int or count < 0 for count in counts) or not inside:
                    raise invalid
                if first + length > shards["files"][file][0] or math.prod(sizes) * dtype.itemsize > length:
                    raise invalid
                numbers += math.prod(sizes)
                stored += length
            if not _NAME.fullmatch(name) or numbers != math.prod(shape) or not isinstance(dtype, torch.dtype):
                raise invalid
            match name.split("/"):
                case [_, number, index, key] if key in states[int(number)]["state"][int(index)]:
                    raise invalid
        if stored > sum(size for size, _ in shards["files"].values()):
            raise invalid
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise invalid from error


def _plain(metadata: Metadata) -> dict[str, Any]:
    """The metadata of tensors in plain containers."""
    plain: dict[str, Any] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        parts = []
        for chunk in tensor.chunks:
            stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            place = [stored.relative_path, stored.offset, stored.length]
            parts.append([list(chunk.offsets), list(chunk.sizes), *place])
        plain[name] = [tensor.properties.dtype, list(tensor.size), parts]
    return plain


def _metadata(tensors: Mapping[str, Any]) -> Metadata:
    """The opposite of `_plain`."""
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, (dtype, shape, parts) in tensors.items():
        chunks = []
        for offsets, sizes, *place in parts:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            places[MetadataIndex(name, offsets)] = _StorageInfo(*place)
        described[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
    return Metadata(described, storage_data=places)
