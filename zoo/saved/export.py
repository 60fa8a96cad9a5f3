"""`export`: a trained model as a folder that other programs can read: weights, config and tokenizer."""

from pathlib import Path

from zoo.checkpoints.tensor_files import TensorsInMemory
from zoo.files.output import check_output
from zoo.files.safe_yaml import dump_yaml
from zoo.saved.exported_folder import CONFIG, TOKENIZER, write_folder
from zoo.saved.model import Checkpoint


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
    folder, saved = Path(output), Checkpoint(checkpoint, trust)
    _ = saved.source  # raises if there is none
    check_output(folder, "an exported model", overwrite)
    weights = TensorsInMemory(saved.load().state_dict())
    files = {CONFIG: dump_yaml(saved.config)}
    if saved.tokenizer_json is not None:
        files[TOKENIZER] = saved.tokenizer_json
    write_folder(folder, files, weights, hashed=True, signature=saved.signature)
    return folder
