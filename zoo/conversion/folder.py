"""A folder of Hugging Face's: config.json, weights as safetensors, tokenizer. Nothing in it is run."""

import json
from pathlib import Path
from typing import Any

from kernels import UserError
from zoo.checkpoints.tensor_files import INDEX, TensorFiles, has_tensor_files
from zoo.files.links import check_inside, open_to_read
from zoo.files.safe_yaml import check_plain

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
_LARGEST = 4 << 20  # bytes of a config


def is_public(path: str | Path) -> bool:
    """Return whether a folder is one of Hugging Face's, and not one that this project exported."""
    folder = Path(path)
    return (folder / CONFIG).is_file() and not (folder / "config.yaml").exists()


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """The contents of a JSON file of the folder.

    Raises:
        UserError: It is missing, a link that leaves the folder, too large, or no JSON object.
    """
    file = folder / name
    check_inside(file, folder)
    try:
        with open_to_read(file) as opened:
            contents = json.loads(opened.read(_LARGEST))
    except UserError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"checkpoint: {file} cannot be read as JSON: {' '.join(str(error).split())}.") from None
    if not isinstance(contents, dict):
        raise UserError(f"checkpoint: {file} holds no JSON object.")
    check_plain(contents, f"checkpoint: {file}")
    return contents


def read_tensors(folder: Path) -> TensorFiles:
    """The weights of the folder.

    Raises:
        UserError: They are missing, damaged, in pickles, or a link leaves the folder.
    """
    if not has_tensor_files(folder):
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern))
        if pickles:
            raise UserError(
                f"checkpoint: {folder} is refused: its weights are in {pickles[0]}, a pickle, which may run code; "
                "save them as safetensors first."
            )
        raise UserError(f"checkpoint: {folder} has no weights: neither model.safetensors nor {INDEX} is in it.")
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        check_inside(file, folder)
    return TensorFiles(folder)


def tokenizer_file(folder: Path) -> Path | None:
    """The `tokenizer.json` of the folder, if it has one.

    Raises:
        UserError: It is a link that leaves the folder.
    """
    file = folder / TOKENIZER
    if not file.is_file():
        return None
    check_inside(file, folder)
    return file
