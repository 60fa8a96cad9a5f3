"""Models that were saved: what `load` takes, and what it finds there."""

from pathlib import Path
from typing import Any

import torch
import yaml

from kernels import UserError

from .checkpoint import KEY, load_weights, read_checkpoint
from .config import from_config, parse
from .data.tokenizer import Tokenizer
from .model import LanguageModel


def checkpoint_of(path: str | Path) -> Path:
    """The checkpoint file that `path` means: the file itself, or the last one of a run's folder.

    Raises:
        UserError: There is none.
    """
    path = Path(path)
    if path.is_file():
        return path
    if path.is_dir():
        for candidate in (path / "checkpoints" / "last.ckpt", path / "last.ckpt"):
            if candidate.is_file():
                return candidate
        raise UserError(f"checkpoint: the folder {path} holds no checkpoints/last.ckpt")
    near = Path("runs") / path
    hint = f"; did you mean {near}?" if near.exists() else ""
    raise UserError(f"checkpoint: there is nothing at {path}{hint}")


def load(path: str | Path, device: torch.device | str | None = None) -> LanguageModel:
    """The trained model of a checkpoint, a run's folder, or an exported folder, ready for evaluation.

    Args:
        path: A `.ckpt` file, a folder of a run, or a folder with `config.yaml` and `model.safetensors`.
        device: Where to put it.

    Raises:
        UserError: There is no model, or it is truncated, foreign, or of another format; or there is no such device.
    """
    _check_device(device or "cpu")
    folder = Path(path)
    if (folder / "model.safetensors").is_file():
        model = from_config(parse(_read_yaml(folder / "config.yaml")))
        load_weights(model, folder / "model.safetensors")
    else:
        file = checkpoint_of(path)
        model = from_config(parse(_contents(file)["config"]))
        load_weights(model, file)
    return model.to(device or "cpu").eval()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer that belongs to a saved model (see `load`).

    Raises:
        UserError: There is none.
    """
    folder = Path(path)
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_file(folder / "tokenizer.json")
    if (folder / "model.safetensors").is_file():
        raise UserError(f"checkpoint: {folder} has no tokenizer.json, so it has no text")
    file = checkpoint_of(path)
    text = _contents(file)["tokenizer"]
    if text is None:
        raise UserError(f"checkpoint: {file} was trained without a tokenizer, so it has no text")
    return Tokenizer.from_json(text)


def _check_device(device: torch.device | str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # an unknown name; one that this PyTorch cannot use
        raise UserError(f"device: {device} cannot be used here: {str(error).splitlines()[0]}") from None


def _contents(file: Path) -> dict[str, Any]:
    contents = read_checkpoint(file)[KEY]
    if contents["config"] is None:
        raise UserError(f"checkpoint: {file} holds no config to build its model from")
    return contents


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"checkpoint: {path} is missing")
    return yaml.safe_load(path.read_text(encoding="utf-8"))
