"""Weights as safetensors, in one file or in shards with Hugging Face's index, read and written a shard at a time."""

import json
import logging
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from kernels.errors import UserError

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000  # of a shard, as is customary
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Spec(NamedTuple):
    """The shape and dtype of a tensor that is not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


class Weights(Protocol):
    """Named tensors that are read one at a time."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Name → shape and dtype."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, on the CPU."""
        ...


class TensorsInMemory:
    """Tensors that were read before."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors
        self.specs = {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """One of the tensors."""
        return self._tensors[name]


class TensorFiles:
    """The tensors of a folder, or of one `.safetensors` file. One file at a time is mapped into memory.

    `specs` is name → shape and dtype; `files` are all files with weights. A UserError if a file is missing or damaged,
    the index names a file outside the folder, or a tensor is not of floating point.
    """

    def __init__(self, path: Path):
        self._opened: tuple[Path, Any] | None = None
        self._file: dict[str, Path] = {}
        self.specs: dict[str, Spec] = {}
        if not path.exists():
            raise UserError(f"{path} does not exist.")
        index = None if path.is_file() or (path / SINGLE).is_file() else read_index(path / INDEX)
        single = path if path.is_file() else path / SINGLE
        self.files = [single] if index is None else [path / name for name in sorted(set(index.values()))]
        for file in self.files:
            if not file.is_file():
                raise UserError(f"{path} is incomplete: {file.name}, which {INDEX} names, is missing.")
            opened = self._open(file)
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if index is None or index.get(name) == file.name:
                    self.specs[name], self._file[name] = _spec(opened.get_slice(name), name, file), file
        if index is not None and (lost := next((name for name in index if name not in self.specs), None)):
            raise UserError(f"{path} is incomplete: {index[lost]} lacks {lost}, which {INDEX} says is in it.")

    def tensor(self, name: str) -> Tensor:
        """Read one tensor; its memory is a map of the file."""
        file = self._file[name]
        try:
            return self._open(file).get_tensor(name)
        except Exception as error:  # the library raises custom types
            raise _unreadable(file, error) from error

    def _open(self, file: Path) -> Any:
        from safetensors import safe_open  # imported here, since other checkpoints do not need the package

        if self._opened is None or self._opened[0] != file:
            try:
                self._opened = file, safe_open(file, framework="pt")
            except Exception as error:  # the library raises custom types
                raise _unreadable(file, error) from error
        return self._opened[1]


def has_tensor_files(folder: Path) -> bool:
    """Return whether a folder holds weights that `TensorFiles` reads."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def write_tensor_files(weights: Weights, folder: Path, max_bytes: int | None = SHARD_BYTES) -> list[str]:
    """Write weights as `model.safetensors`, or in shards with an index if they are larger than `max_bytes`.

    Memory holds one shard at a time. A tensor larger than `max_bytes` gets a separate shard. Returns the files' names.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    total = sum(spec.bytes for spec in weights.specs.values())
    split = split_state_dict_into_shards_factory(
        cast(dict[str, Any], weights.specs),
        get_storage_size=lambda spec: spec.bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max(total, 1) if max_bytes is None else max_bytes,
    )
    for file, shard in split.filename_to_tensors.items():
        # cloned, since safetensors cannot represent tensors that share memory
        tensors = {name: weights.tensor(name).clone(memory_format=torch.contiguous_format) for name in shard}
        for name, tensor in tensors.items():
            warn_unless_finite(name, tensor)
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # what became of an OSError
            raise OSError(str(error)) from error
        # safetensors 0.8 makes its files readable by the user alone; they get the default mode of new files
        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as temporary:
            (new := Path(temporary) / "new").touch()
            (folder / file).chmod(new.stat().st_mode & 0o777)
    if not split.is_sharded:
        return [*split.filename_to_tensors]
    index = {"metadata": {"total_size": total}, "weight_map": split.tensor_to_filename}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return [*split.filename_to_tensors, INDEX]


def warn_unless_finite(name: str, tensor: Tensor) -> None:
    """Log a warning if a tensor that is written has values that are not finite."""
    if number := int((~tensor.isfinite()).sum()):
        log.warning("%s has %d values that are not finite", name, number)


def read_index(file: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Return tensor → file name, from an index of files with this suffix."""
    try:
        contents = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as an index of weights: {error}.") from None
    places = contents.get("weight_map") if isinstance(contents, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(x, str) for x in places.values()):
        raise UserError(f"{file} is not an index of weights: it needs a weight_map of tensors to files.")
    for name in places.values():
        if Path(name).name != name or not name.endswith(suffix):
            raise UserError(f"{file} is refused: {name!r} is not a {suffix} file in its folder.")
    return places


def _spec(described: Any, name: str, file: Path) -> Spec:
    if (dtype := _DTYPES.get(described.get_dtype())) is None:
        raise UserError(
            f"{file} is refused: {name} has the dtype {described.get_dtype()}; {', '.join(_DTYPES)} are read."
        )
    return Spec(tuple(described.get_shape()), dtype)


def _unreadable(file: Path, error: Exception) -> UserError:
    return UserError(f"{file} cannot be read as safetensors: {' '.join(str(error).split())}.")
