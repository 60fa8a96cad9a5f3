"""The format of checkpoint files, and reading them; `io.py` writes them."""

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels.errors import UserError
from zoo.checkpoints import zero_shards
from zoo.checkpoints.archive import check_sums, read_seal
from zoo.checkpoints.tensor_files import TensorFiles, Weights, has_tensor_files
from zoo.checkpoints.zero_shards import SHARDS, TENSORS, check_entry
from zoo.files.safe_yaml import check_plain

FORMAT = 2
KEY = "zoo"


def check_format(checkpoint: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> None:
    """Raise a UserError unless this project wrote `checkpoint`, in a format that this version reads."""
    name = "the file" if path is None else str(path)
    contents = checkpoint.get(KEY) if isinstance(checkpoint, Mapping) else None
    if not isinstance(contents, Mapping) or "format" not in contents:
        raise UserError(f"{name} is not a checkpoint of this project: it has no format version.")
    if contents["format"] != FORMAT:
        raise UserError(f"{name} has checkpoint format {contents['format']}, but this version reads format {FORMAT}.")


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint of this project; its tensors are put where `map_location` says, as in `torch.load`.

    Returns:
        Lightning's checkpoint; its entry `zoo` has the format, the config and the tokenizer. A sharded checkpoint has
        an entry `shards` that names its shards, and no `state_dict`.

    Raises:
        UserError: The file is missing, damaged, or not a checkpoint of this project.
    """
    return read_hashed_checkpoint(path, map_location)[0]


def read_hashed_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> tuple[dict[str, Any], str]:
    """As `read_checkpoint`, with the hash of the file's bytes."""
    checkpoint, digest = _read(path, map_location)
    check_format(checkpoint, path)
    contents = checkpoint[KEY]
    if not isinstance(contents.get("config"), dict | None) or not isinstance(contents.get("tokenizer"), str | None):
        raise UserError(f"{path} is not a checkpoint of this project: its config or its tokenizer is invalid.")
    check_plain(contents.get("config"), f"{path}: its config")
    weights = checkpoint.get("state_dict", {})
    if not isinstance(weights, Mapping) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise UserError(f"{path} is not a checkpoint of this project: its state_dict is invalid.")
    _check_shards(path, checkpoint)
    return checkpoint, digest


def read_whole_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """As `read_checkpoint`, but the `state_dict` of a sharded checkpoint is assembled from its shards.

    That of FSDP2 is then as if saved in one file; that of ZeRO keeps its entry `shards`, which has the optimiser.
    """
    checkpoint = read_checkpoint(path, map_location)
    if SHARDS not in checkpoint:
        return checkpoint
    if TENSORS in checkpoint[SHARDS]:
        return _fsdp().whole_checkpoint(path, checkpoint)
    return {**checkpoint, "state_dict": zero_shards.whole_weights(path, checkpoint[SHARDS])}


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the weights of a model from a checkpoint, a `.safetensors` file, a state dict, or a folder of one.

    Returns parameter name in the model → tensor on the CPU. A UserError if the file does not exist or has no weights.
    """
    path = Path(path)
    if path.suffix == ".safetensors" or has_tensor_files(path):
        files = TensorFiles(path)
        return {name: files.tensor(name) for name in files.specs}
    if path.is_dir():
        candidates = [path / "last.ckpt", path / "checkpoints" / "last.ckpt"]
        file = next((candidate for candidate in candidates if candidate.is_file()), None)
        if file is None:
            raise UserError(f"the folder {path} has no weights: expected model.safetensors or last.ckpt in it.")
        path = file
    contents, _ = _read(path, "cpu")
    if isinstance(contents, Mapping) and SHARDS in contents:
        _check_shards(path, contents)
    return weights_in(contents, path)


def weights_in(contents: Any, path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The weights in the contents of the file `path`, by the model's names; those of shards are read."""
    if isinstance(contents, Mapping) and SHARDS in contents:
        kind = _fsdp() if TENSORS in contents[SHARDS] else zero_shards
        contents = {**contents, "state_dict": kind.whole_weights(path, contents[SHARDS])}
    if isinstance(contents, Mapping) and isinstance(contents.get("state_dict"), Mapping):
        # in Lightning's checkpoint the names start with `model.`
        contents = {str(name).removeprefix("model."): tensor for name, tensor in contents["state_dict"].items()}
    if not isinstance(contents, Mapping) or not contents or not all(isinstance(t, Tensor) for t in contents.values()):
        raise UserError(f"{path} holds no weights: expected a checkpoint, a state dict or a .safetensors file.")
    return dict(contents)


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load the weights in `path` (anything that `read_weights` reads) into `model`; safetensors a part at a time.

    Raises:
        UserError: They do not fit the model, or are not finite.
    """
    path = Path(path)
    if path.suffix == ".safetensors" or has_tensor_files(path):
        load_tensors(model, TensorFiles(path), path)
    else:
        weights = read_weights(path)
        check_weights(weights, model, path)
        model.load_state_dict(weights)
    if bad := [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]:
        raise UserError(f"{path} has values that are not finite in {len(bad)} of its weights, first {bad[0]}.")


def load_tensors(model: nn.Module, weights: Weights, path: str | os.PathLike[str]) -> None:
    """Load weights into `model` block by block, so that at most one block is in memory in addition to the model."""
    check_weights(weights.specs, model, path)
    direct = {**dict(model.named_parameters(recurse=False)), **dict(model.named_buffers(recurse=False))}
    for name in direct.keys() & weights.specs.keys():
        direct[name].data.copy_(weights.tensor(name))
    for name, part in _parts(model):
        names = [other for other in weights.specs if other.startswith(f"{name}.")]
        part.load_state_dict({other.removeprefix(f"{name}."): weights.tensor(other) for other in names})


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Name → shape in a model's state dict, of which modules may copy parts: one block of it is in memory at a time."""
    if next(itertools.chain(model.parameters(recurse=False), model.buffers(recurse=False)), None) is not None:
        return {name: tensor.shape for name, tensor in model.state_dict().items()}
    return {f"{name}.{key}": tensor.shape for name, part in _parts(model) for key, tensor in part.state_dict().items()}


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a model, and of its lists of blocks each block."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{i}", block) for i, block in enumerate(child))
        else:
            yield name, child


def check_weights(weights: Mapping[str, Any], model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Raise a UserError that names `path` unless the names and shapes of `weights` match `model`.

    Names may be those of its state dict, or those of its modules' parameters and buffers, which differ if a module
    splits tensors in its state dict; DeepSpeed only knows the latter.
    """
    expected = _shapes(model)
    registered = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    if weights.keys() & (registered.keys() - expected.keys()):
        persistent = {name for name in expected if name in registered}
        expected = {n: t.shape for n, t in registered.items() if n in persistent or isinstance(t, nn.Parameter)}
    if missing := [name for name in expected if name not in weights]:
        raise UserError(f"{path} does not fit the model: it lacks {len(missing)} of its weights, first {missing[0]}.")
    if extra := [name for name in weights if name not in expected]:
        raise UserError(f"{path} does not fit the model, which has no {extra[0]} ({len(extra)} such weights).")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != tuple(shape):
            saved, required = tuple(weights[name].shape), tuple(shape)
            raise UserError(f"{path} does not fit the model: {name} has shape {saved}, the model's is {required}.")


def _fsdp() -> Any:
    """The module of the shards that FSDP writes. It imports sharded tensors, which takes half as long as PyTorch."""
    from zoo.checkpoints import fsdp_shards

    return fsdp_shards


def _check_shards(path: str | os.PathLike[str], checkpoint: Mapping[str, Any]) -> None:
    """Raise a UserError unless the entry `shards` of a sharded checkpoint is valid."""
    if SHARDS in checkpoint:
        check_entry(path, checkpoint[SHARDS])
        if TENSORS in checkpoint[SHARDS]:
            _fsdp().check_tensors(path, checkpoint)


def _read(path: str | os.PathLike[str], map_location: Any) -> tuple[Any, str]:
    """Load a file of `torch.save`, opened once, after checking it; also returns its hash. No code in it is run."""
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint at {path}.")
    try:
        with open(path, "rb") as file:
            sealed, digest = read_seal(path, file)
            if not sealed:
                check_sums(path, file)
            file.seek(0)
            loaded = torch.load(file, map_location=map_location, weights_only=True)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read: permission denied.") from error
    except UserError:
        raise
    except Exception as error:  # PyTorch raises many types for foreign files
        if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserError(f"{path} is refused: it names {match[1]}, which does not belong in weights.") from error
        raise UserError(f"{path} is truncated or not a checkpoint of this project.") from error
    contents = loaded.get(KEY) if isinstance(loaded, Mapping) else None
    if isinstance(contents, Mapping) and not sealed:
        raise UserError(f"{path} is damaged: the hash at its end is missing.")
    return loaded, digest
