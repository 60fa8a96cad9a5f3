"""Exporting a trained model to a folder that other programs can read: weights, config and tokenizer."""

from pathlib import Path

from safetensors.torch import save

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
    # cloned, since safetensors cannot represent tensors that share memory
    weights = {name: tensor.clone().contiguous() for name, tensor in load(file, trust=trust).state_dict().items()}
    files = {
        "config.yaml": dump_yaml(contents["config"]).encode(),
        "model.safetensors": save(weights),
    }
    if contents["tokenizer"] is not None:
        files["tokenizer.json"] = contents["tokenizer"].encode()
    files[NAME] = hashes(files, contents.get("signature"))
    try:
        for name, content in files.items():
            with atomic_write(folder / name) as opened:
                opened.write(content)
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror}") from error
    return folder
