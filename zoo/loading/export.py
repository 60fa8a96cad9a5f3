"""Exporting a trained model to a folder that other programs can read: weights, config and tokenizer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save
from torch import Tensor

from kernels import UserError
from zoo.files.atomic import atomic_write
from zoo.files.safe_yaml import dump_yaml
from zoo.loading.hashes import NAME, hashes
from zoo.loading.load import checkpoint_of, load, saved


def export(checkpoint: str | Path, output: str | Path, trust: bool = False) -> Path:
    """Write a trained model to `model.safetensors`, `config.yaml` and, if it has a tokenizer, `tokenizer.json`.

    `load` and `optim.initial_weights` accept the folder. `hashes.json` lets `load` detect damaged files.

    Args:
        checkpoint: A run's folder or a .ckpt file; ZeRO shards are assembled to whole weights.
        output: The folder to write; other files in it stay.
        trust: Whether to import and call what the model's config names, even if someone else wrote it.

    Returns:
        The folder.

    Raises:
        UserError: The model does not exist or is damaged, or the folder is not writable.
    """
    file, folder = checkpoint_of(checkpoint), Path(output)
    contents = saved(file)
    weights = load(file, trust=trust).state_dict()
    write_folder(folder, contents["config"], weights, contents["tokenizer"], contents.get("signature"))
    return folder


def write_folder(
    folder: Path, config: dict[str, Any], weights: Mapping[str, Tensor], tokenizer: str | None, signature: str | None
) -> None:
    """Write an exported folder: `config.yaml`, `model.safetensors`, `tokenizer.json` and `hashes.json`.

    A folder that does not exist yet appears when it is complete.

    Args:
        folder: The folder to write; other files in it stay.
        config: The config of the model's run.
        weights: The model's state dict.
        tokenizer: The tokenizer as JSON; None if there is none.
        signature: The signature of the config; None if it has none.

    Raises:
        UserError: The folder is not writable.
    """
    # cloned, since safetensors cannot represent tensors that share memory
    whole = {name: tensor.clone().contiguous() for name, tensor in weights.items()}
    files = {"config.yaml": dump_yaml(config).encode(), "model.safetensors": save(whole)}
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer.encode()
    files[NAME] = hashes(files, signature)
    try:
        with new_folder(folder) as written:
            for name, content in files.items():
                with atomic_write(written / name) as opened:
                    opened.write(content)
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror}") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that takes its name when the block ends without an error; `folder` itself if it exists.

    Args:
        folder: The folder; the one around it is created if it does not exist.
    """
    if folder.exists():
        yield folder
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True) as temporary:
        partial = Path(temporary) / folder.name  # inside, as only its owner can read a temporary folder
        partial.mkdir()
        yield partial
        partial.rename(folder)
