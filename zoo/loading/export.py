"""Exporting a trained model to a folder that other programs can read: weights, config and tokenizer."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save
from torch import Tensor

from kernels import UserError
from zoo.checkpoints.tensor_files import SHARD_BYTES, Weights, write_tensor_files
from zoo.files.atomic import atomic_write
from zoo.files.output import check_output, replace_files
from zoo.files.safe_yaml import dump_yaml
from zoo.loading.hashes import NAME, hashes
from zoo.loading.load import checkpoint_of, load, saved


def export(checkpoint: str | Path, output: str | Path, trust: bool = False, overwrite: bool = False) -> Path:
    """Write a trained model to `model.safetensors`, `config.yaml` and, if it has a tokenizer, `tokenizer.json`.

    `load` and `optim.initial_weights` accept the folder. `hashes.json` lets `load` detect damaged files.

    Args:
        checkpoint: A run's folder or a .ckpt file; ZeRO shards are assembled to whole weights.
        output: The folder to write.
        trust: Whether to import and call what the model's config names, even if someone else wrote it.
        overwrite: Whether to replace a model that was exported there; other files in the folder stay.

    Returns:
        The folder.

    Raises:
        UserError: The model does not exist or is damaged, or the folder holds something else or is not writable.
    """
    file, folder = checkpoint_of(checkpoint), Path(output)
    check_output(folder, "an exported model", overwrite)
    contents = saved(file)
    weights = load(file, trust=trust).state_dict()
    write_folder(folder, contents["config"], weights, contents["tokenizer"], contents.get("signature"))
    return folder


def write_folder(
    folder: Path, config: dict[str, Any], weights: Mapping[str, Tensor], tokenizer: str | None, signature: str | None
) -> None:
    """Write an exported folder: `config.yaml`, `model.safetensors`, `tokenizer.json` and `hashes.json`.

    Args:
        folder: The folder to write, as `new_folder` does.
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


def write_new_folder(
    folder: Path,
    config: dict[str, Any],
    weights: Weights,
    tokenizer: str | None,
    signature: str | None,
    most_bytes: int = SHARD_BYTES,
) -> None:
    """As `write_folder`, but memory holds one shard of the weights at a time.

    Args:
        folder: The folder to write.
        config, tokenizer, signature: As for `write_folder`.
        weights: What to write.
        most_bytes: The largest size of a file with weights.

    Raises:
        UserError: The folder is not writable.
    """
    files = {"config.yaml": dump_yaml(config)}
    if tokenizer is not None:
        files["tokenizer.json"] = tokenizer
    with files_of_new_folder(folder, files, weights, most_bytes) as written:
        (written[0].parent / NAME).write_bytes(hashes({file.name: file for file in written}, signature))


@contextmanager
def files_of_new_folder(
    folder: Path, files: Mapping[str, str], weights: Weights, most_bytes: int
) -> Iterator[list[Path]]:
    """Texts and weights in a `new_folder`, which appear when the block ends without an error.

    Args:
        folder: The folder.
        files: File name → content.
        weights: What to write as safetensors.
        most_bytes: The largest size of a file with weights.

    Yields:
        The files, where they are until then.

    Raises:
        UserError: The folder is not writable.
    """
    try:
        with new_folder(folder) as partial:
            for name, content in files.items():
                with atomic_write(partial / name) as opened:
                    opened.write(content.encode())
            names = [*files, *write_tensor_files(weights, partial, most_bytes)]
            yield [partial / name for name in names]
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror or error}") from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder next to `folder` that takes its name when the block ends without an error.

    The files of an existing folder are replaced; call `check_output` before.

    Args:
        folder: The folder; the one around it is created if it does not exist.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True) as temporary:
        partial = Path(temporary) / folder.name  # inside, as only its owner can read a temporary folder
        partial.mkdir()
        yield partial
        if folder.is_dir():
            replace_files(folder, partial)
        else:
            partial.rename(folder)
