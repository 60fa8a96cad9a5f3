"""A trained model as a folder that other programs can read: weights, config and tokenizer in a file each."""

from pathlib import Path

import yaml
from safetensors.torch import save

from kernels import UserError
from zoo.files.atomic import atomic_write
from zoo.loading.hashes import NAME, hashes
from zoo.loading.load import checkpoint_of, load, saved


def export(checkpoint: str | Path, output: str | Path, trust: bool = False) -> Path:
    """Write a trained model to `model.safetensors`, `config.yaml` and, of text, `tokenizer.json`.

    Weights that several processes saved in parts are put together. `load` and `optim.initial_weights` take the folder.
    `hashes.json` lets `load` see whether a file was damaged since.

    Args:
        checkpoint: A run's folder or a .ckpt file; of a sharded one the weights are put together.
        output: The folder to write; what else is in it stays.
        trust: Whether to import and call what its config names, if it is not your own.

    Returns:
        The folder.

    Raises:
        UserError: There is no model, it is damaged, or the folder cannot be written.
    """
    file, folder = checkpoint_of(checkpoint), Path(output)
    contents = saved(file)
    # copies: a format without pickle does not know that two names may share one tensor
    weights = {name: tensor.clone().contiguous() for name, tensor in load(file, trust=trust).state_dict().items()}
    files = {
        "config.yaml": yaml.safe_dump(contents["config"], sort_keys=False, allow_unicode=True).encode(),
        "model.safetensors": save(weights),
    }
    if contents["tokenizer"] is not None:
        files["tokenizer.json"] = contents["tokenizer"].encode()
    files[NAME] = hashes(files, contents.get("signature"))
    try:
        for name, content in files.items():
            with atomic_write(folder / name) as written:
                written.write(content)
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror}") from error
    return folder
