"""`convert`: public checkpoints to this project's format, and models of this project to public layouts."""

import json
import logging
from pathlib import Path

from kernels import UserError
from zoo.checkpoints.signature import sign
from zoo.checkpoints.tensor_files import SHARD_BYTES
from zoo.conversion.convert import exported
from zoo.conversion.folder import CONFIG, is_public
from zoo.conversion.tokenizer import described, stop_config
from zoo.files.output import check_output
from zoo.loading.export import files_of_new_folder, write_new_folder
from zoo.loading.load import build_described, find, find_tokenizer
from zoo.loading.model_card import NAME as CARD
from zoo.loading.model_card import model_card

log = logging.getLogger(__name__)


def convert(
    checkpoint: str | Path,
    output: str | Path,
    to: str | None = None,
    max_shard_size: int = SHARD_BYTES,
    trust: bool = False,
    overwrite: bool = False,
) -> Path:
    """Convert a public checkpoint into a model of this project, or, with `to`, a model into a public layout.

    A public folder gets a model card, README.md. Fields that the run does not record are left to be filled in.
    Weights keep their dtype and are converted a shard at a time. Nothing in the checkpoint is run.

    Args:
        checkpoint: A folder of Hugging Face or flash-linear-attention; with `to` also a run's folder, a .ckpt file or
            an exported folder.
        output: The folder to write.
        to: `fla` or `huggingface`, for a folder that `from_pretrained` loads, or the name of a family where several can
            hold the model, such as `hf_qwen3_next`; None for the format that `export` writes.
        max_shard_size: Bytes of a file with weights, at most; larger models are divided.
        trust: Whether to import and call what the model's config names, even if someone else wrote it.
        overwrite: Whether to replace a model of the same kind that was written there; other files in the folder stay.

    Returns:
        The folder.

    Raises:
        UserError: The checkpoint is unknown, incomplete, damaged or of a kind that cannot be converted, or the output
            holds something else or cannot be written.
    """
    folder = Path(output)
    check_output(folder, "an exported model" if to is None else "a public model", overwrite, checkpoint)
    if max_shard_size < 1:
        raise UserError(f"max_shard_size: {max_shard_size} must be at least 1 byte.")
    if to is None and not is_public(checkpoint):
        find(checkpoint)  # raises if there is nothing
        raise UserError(f"to: null reads public checkpoints, and {checkpoint} is not one; choose fla or huggingface.")
    saved, tokenizer = find(checkpoint), find_tokenizer(checkpoint, trust)
    if tokenizer is None:
        log.warning("%s has no tokenizer.json, so the converted model has no tokenizer.", checkpoint)
    if to is None:
        assert saved.weights is not None, "a public folder has files of tensors"
        config = {"model": saved.config["model"]}
        written = None if tokenizer is None else tokenizer.to_json()
        write_new_folder(folder, config, saved.weights, written, sign(config), max_shard_size)
        return folder
    model, weights = build_described(saved, trust)
    public = exported(model, weights, to)
    ends = {} if tokenizer is None else stop_config(tokenizer)
    files = {CONFIG: json.dumps({**public.config, **ends}, indent=2)}
    files |= {} if tokenizer is None else described(tokenizer)
    files[CARD] = model_card(folder.name, model, saved.config, Path(checkpoint), public.family)
    with files_of_new_folder(folder, files, public.weights, max_shard_size):
        return folder
