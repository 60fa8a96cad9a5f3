"""Weights in `pytorch_model.bin`, or in its shards with Hugging Face's index. Only tensors are unpickled."""

from pathlib import Path

import torch
from torch import Tensor

from kernels import UserError
from zoo.checkpoints.format import read_weights
from zoo.checkpoints.tensor_files import Spec, read_index
from zoo.files.links import check_inside

SINGLE = "pytorch_model.bin"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INDEX = f"{SINGLE}.index.json"


class PickledTensors:
    """The tensors of a folder. Memory holds one file at a time.

    `specs` is name → shape and dtype; `files` are all files with weights.

    Raises:
        UserError: A file is missing, damaged or outside the folder, holds anything but tensors of floating point, or
            lacks a tensor that the index says is in it.
    """

    def __init__(self, folder: Path):
        index = None if (folder / SINGLE).is_file() else read_index(folder / INDEX, ".bin")
        self.files = [folder / name for name in ([SINGLE] if index is None else sorted(set(index.values())))]
        self._file: dict[str, Path] = {}
        self._opened: tuple[Path, dict[str, Tensor]] | None = None
        self.specs: dict[str, Spec] = {}
        for file in self.files:
            check_inside(file, folder)
            if not file.is_file():
                raise UserError(f"{folder} is incomplete: {file.name}, which {INDEX} names, is missing.")
            for name, tensor in self._read(file).items():
                if not isinstance(name, str):
                    raise UserError(f"checkpoint: {file} is refused: {name!r:.80} is not a name of a tensor.")
                if tensor.dtype not in DTYPES:
                    raise UserError(f"checkpoint: {file} is refused: {name!r:.80} has the dtype {tensor.dtype}.")
                self.specs[name], self._file[name] = Spec(tuple(tensor.shape), tensor.dtype), file
        if lost := next((name for name in index or () if name not in self.specs), None):
            raise UserError(f"{folder} is incomplete: none of its files has {lost}, which {INDEX} names.")

    def tensor(self, name: str) -> Tensor:
        """Return one tensor."""
        return self._read(self._file[name])[name]

    def _read(self, file: Path) -> dict[str, Tensor]:
        if self._opened is None or self._opened[0] != file:
            self._opened = None  # before the next file takes memory
            try:
                self._opened = file, read_weights(file)
            except UserError as error:
                raise UserError(f"checkpoint: {file} is refused, as only tensors are unpickled: {error}") from None
        return self._opened[1]


def has_pickles(folder: Path) -> bool:
    """Return whether a folder holds weights that `PickledTensors` reads."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()
