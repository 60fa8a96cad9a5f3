"""`convert`: public checkpoints into folders of ours, and models of ours into public folders."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from kernels import UserError
from zoo.checkpoints.signature import sign
from zoo.checkpoints.tensor_files import SHARD_BYTES, TensorsInMemory, Weights, write_tensor_files
from zoo.conversion.convert import exported
from zoo.conversion.folder import CONFIG, is_public
from zoo.conversion.tokenizer import described
from zoo.files.safe_yaml import dump_yaml
from zoo.loading.export import new_folder
from zoo.loading.hashes import NAME, hashes
from zoo.loading.load import build_saved, find, find_tokenizer, load

log = logging.getLogger(__name__)


def convert(
    checkpoint: str | Path,
    output: str | Path,
    to: str | None = None,
    max_shard_size: int = SHARD_BYTES,
    trust: bool = False,
) -> Path:
    """Convert a public checkpoint into a model of ours, or, with `to`, a model into a public layout.

    Weights keep their dtype and are converted a shard at a time. Nothing in the checkpoint is run.

    Args:
        checkpoint: A folder of Hugging Face or flash-linear-attention; with `to` also a run's folder, a .ckpt file or
            an exported folder.
        output: The folder to write, which must not exist.
        to: `fla` or `huggingface`, for a folder that `from_pretrained` loads, or the name of a family where several can
            hold the model, such as `hf_qwen3_next`; None for one of ours, as `export` writes.
        max_shard_size: Bytes of a file with weights, at most; larger models are divided.
        trust: Whether to import and call what the model's config names, even if someone else wrote it.

    Returns:
        The folder.

    Raises:
        UserError: The checkpoint is unknown, incomplete, damaged or of a kind that cannot be converted, or the output
            exists or cannot be written.
    """
    folder = Path(output)
    if os.path.lexists(folder):
        raise UserError(f"output: {folder} exists already; name a folder that does not.")
    if max_shard_size < 1:
        raise UserError(f"max_shard_size: {max_shard_size} must be at least 1 byte.")
    if to is None and not is_public(checkpoint):
        find(checkpoint)  # raises if there is nothing
        raise UserError(f"to: null makes a model of ours, which {checkpoint} is already; choose fla or huggingface.")
    found, tokenizer = find(checkpoint), find_tokenizer(checkpoint)
    weights, files = found.weights, dict[str, str]()
    if weights is None:
        weights = TensorsInMemory(load(checkpoint, trust=trust).state_dict())
    if tokenizer is None:
        log.warning("%s has no tokenizer.json, so the converted model has no tokenizer.", checkpoint)
    if to is None:
        config = {"model": found.config["model"]}
        files["config.yaml"] = dump_yaml(config)
        if tokenizer is not None:
            files["tokenizer.json"] = tokenizer.to_json()
        signature = sign(config)
    else:
        public = exported(build_saved(found, trust, "meta"), weights, to)
        ends = {} if tokenizer is None else {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id}
        files[CONFIG] = json.dumps({**public.config, **ends}, indent=2)
        files |= {} if tokenizer is None else described(tokenizer)
        weights = public.weights
    try:
        with new_folder(folder) as partial:
            written = _write(partial, files, weights, max_shard_size)
            if to is None:
                (partial / NAME).write_bytes(hashes({name: partial / name for name in written}, signature))
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written: {error.strerror or error}") from error
    return folder


def _write(folder: Path, files: Mapping[str, str], weights: Weights, most_bytes: int) -> list[str]:
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    return [*files, *write_tensor_files(weights, folder, most_bytes)]
