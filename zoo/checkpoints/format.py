"""The checkpoint file: its format, and how it is read."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kernels.errors import UserError
from zoo.checkpoints.archive import check_archive, is_sealed
from zoo.checkpoints.zero_shards import SHARDS, check_entry, whole_weights
from zoo.files.safe_yaml import check_plain

FORMAT = 2  # 1 had no hash
KEY = "zoo"


def check_format(checkpoint: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> None:
    """Raise a UserError unless `checkpoint` was written by this project in a format that this version reads."""
    name = "the file" if path is None else str(path)
    contents = checkpoint.get(KEY) if isinstance(checkpoint, Mapping) else None
    if not isinstance(contents, Mapping) or "format" not in contents:
        raise UserError(f"{name} is not a checkpoint of this project: it has no format version.")
    if contents["format"] not in (1, FORMAT):
        raise UserError(
            f"{name} has checkpoint format {contents['format']}, but this version reads the formats 1 and {FORMAT}."
        )


def read_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint of this project.

    Args:
        path: The file.
        map_location: Where its tensors go, as in `torch.load`.

    Returns:
        Lightning's checkpoint; under `zoo` it has the format, the config and the tokenizer. Where the weights are in
        shards beside it, `shards` says where, and there is no `state_dict`.

    Raises:
        UserError: If the file is missing, damaged, or not a checkpoint of this project.
    """
    checkpoint = _read(path, map_location)
    check_format(checkpoint, path)
    contents = checkpoint[KEY]
    if not isinstance(contents.get("config"), dict | None) or not isinstance(contents.get("tokenizer"), str | None):
        raise UserError(f"{path} is not a checkpoint of this project: its config or its tokenizer is no such thing.")
    check_plain(contents.get("config"), f"{path}: its config")
    weights = checkpoint.get("state_dict", {})
    if not isinstance(weights, Mapping) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise UserError(f"{path} is not a checkpoint of this project: its state_dict is no such thing.")
    if SHARDS in checkpoint:
        check_entry(path, checkpoint[SHARDS])
    return checkpoint


def read_whole_checkpoint(path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
    """As `read_checkpoint`, with `state_dict` also where the checkpoint has its weights in shards beside it."""
    checkpoint = read_checkpoint(path, map_location)
    if SHARDS in checkpoint:
        checkpoint["state_dict"] = whole_weights(path, checkpoint[SHARDS])
    return checkpoint


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the weights of a model from a checkpoint, a `.safetensors` file, a saved state dict, or a folder of one.

    Args:
        path: The file, or a folder that holds `model.safetensors` or `last.ckpt`, itself or under `checkpoints`.

    Returns:
        Parameter name → tensor on the CPU, with the names that the model uses.

    Raises:
        UserError: If there is no such file or it holds no weights.
    """
    path = Path(path)
    if path.is_dir():
        candidates = [path / "model.safetensors", path / "last.ckpt", path / "checkpoints" / "last.ckpt"]
        found = next((file for file in candidates if file.is_file()), None)
        if found is None:
            raise UserError(f"the folder {path} has no weights: expected model.safetensors or last.ckpt in it.")
        path = found
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    contents = _read(path, "cpu")
    if isinstance(contents, Mapping) and SHARDS in contents:
        check_entry(path, contents[SHARDS])
        contents = {**contents, "state_dict": whole_weights(path, contents[SHARDS])}
    if isinstance(contents, Mapping) and isinstance(contents.get("state_dict"), Mapping):
        # a Lightning checkpoint holds the model as `model`
        contents = {str(name).removeprefix("model."): tensor for name, tensor in contents["state_dict"].items()}
    if not isinstance(contents, Mapping) or not contents or not all(isinstance(t, Tensor) for t in contents.values()):
        raise UserError(f"{path} holds no weights: expected a checkpoint, a state dict or a .safetensors file.")
    return dict(contents)


def load_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Copy the weights in `path` (anything that `read_weights` reads) into `model`.

    Raises:
        UserError: If names or shapes differ; the message names the first one that does.
    """
    weights = read_weights(path)
    check_weights(weights, model, path)
    model.load_state_dict(weights)


def check_weights(weights: Mapping[str, Any], model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Raise a UserError, which names `path`, unless the names and shapes of `weights` are those of `model`.

    The names are those of its state dict, or those under which its modules hold their parameters and buffers, which
    are others where a module divides what it holds; DeepSpeed knows only the latter.
    """
    expected = model.state_dict()
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    if weights.keys() & (held.keys() - expected.keys()):
        persistent = {name for name in expected if name in held}
        expected = {n: t for n, t in held.items() if n in persistent or isinstance(t, nn.Parameter)}
    if missing := [name for name in expected if name not in weights]:
        raise UserError(f"{path} does not fit the model: it lacks {len(missing)} of its weights, first {missing[0]}.")
    if surplus := [name for name in weights if name not in expected]:
        raise UserError(f"{path} does not fit the model, which has no {surplus[0]} ({len(surplus)} such weights).")
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            given, wanted = tuple(weights[name].shape), tuple(tensor.shape)
            raise UserError(f"{path} does not fit the model: {name} has shape {given}, the model's is {wanted}.")


def not_written(path: str | os.PathLike[str], error: OSError) -> UserError:
    """What to say when a checkpoint cannot be written: the disk is full, or read-only, or gone."""
    reason = error.strerror or " ".join(str(error).split())
    kept = "what was saved there before is kept" if Path(path).exists() else "none was saved there before"
    return UserError(f"the checkpoint {path} cannot be written: {reason}; {kept}.")


def _read(path: str | os.PathLike[str], map_location: Any) -> Any:
    """What `torch.save` wrote, once nothing speaks against reading it; no code in it is run."""
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint at {path}.")
    try:
        sealed = is_sealed(path)
        check_archive(path, contents=not sealed)
        found = torch.load(path, map_location=map_location, weights_only=True)
    except PermissionError as error:
        raise UserError(f"{path} cannot be read: permission denied.") from error
    except UserError:
        raise
    except Exception as error:  # whatever PyTorch makes of a file that is none of its own
        if called := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise UserError(f"{path} is refused: it names {called[1]}, which is no part of any weights.") from error
        raise UserError(f"{path} is truncated or not a checkpoint of this project.") from error
    contents = found.get(KEY) if isinstance(found, Mapping) else None
    if isinstance(contents, Mapping) and contents.get("format") == FORMAT and not sealed:
        raise UserError(f"{path} is damaged: the hash at its end is missing.")
    return found


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError  # here: a checkpoint alone does not need the package
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}.") from error
