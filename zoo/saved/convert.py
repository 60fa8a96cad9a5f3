"""`convert`: public checkpoints to this project's format, and models of this project to public layouts."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from kernels import UserError
from zoo.arguments import names_in
from zoo.checkpoints.signature import sign
from zoo.checkpoints.tensor_files import SHARD_BYTES
from zoo.files.output import CARD, Kind, check_output, check_shard_size
from zoo.files.safe_yaml import dump_yaml
from zoo.lm.size_table import mixer_names
from zoo.saved.exported_folder import CONFIG, TOKENIZER, write_folder
from zoo.saved.gguf.written import check_type, write_gguf
from zoo.saved.model import SavedModel
from zoo.saved.plan import rows_of, show_plan
from zoo.saved.public.family import GGUF
from zoo.saved.public.folder import CONFIG as PUBLIC_CONFIG
from zoo.saved.public.import_export import described, exported
from zoo.saved.public.tokenizer import stop_config, tokenizer_files

log = logging.getLogger(__name__)

_CONTEXT = 4096  # where no config says for which context a model was made
_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [{tags}]
---

# {name}

A language model of {layers} layers of {mixers} with {parameters:,} parameters, trained and converted by the
token-mixer zoo into the layout `{layout}`.

*To be filled in*: the training data, the evaluation, the licence (also as `license:` at the top), what the model is
for, and what it must not be used for.

```python
{load}
```
"""
_TRANSFORMERS = 'from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained("{name}"'
_LOAD = {
    "fla": f"import fla  # flash-linear-attention, on a GPU\n{_TRANSFORMERS})",
    "huggingface": f"{_TRANSFORMERS})",
    "transformers": f"{_TRANSFORMERS}, trust_remote_code=True)",
}


def convert(
    checkpoint: str | Path,
    output: str | Path,
    to: str | None = None,
    quantize: str | None = None,
    max_shard_size: int = SHARD_BYTES,
    ignore: list[str] | str | None = None,
    trust: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
) -> Path:
    """Convert a public checkpoint into a model of this project, or, with `to`, a model into a public layout.

    A public folder gets a model card, README.md, with places that are left to be filled in.
    Weights keep their dtype and are converted a shard at a time. Nothing in the checkpoint is run.

    Args:
        checkpoint: A folder of Hugging Face or flash-linear-attention, a .pth file of RWKV-7 or a .gguf file;
            hf://owner/name[@revision] for a folder on the Hub; with `to` also a run's folder, a .ckpt file or an
            exported folder.
        output: The folder to write, or the file for `gguf`.
        to: `fla` or `huggingface`, for a folder that `from_pretrained` loads, or the name of a family where several can
            hold the model, such as `hf_qwen3_5`; `transformers` for a folder with code that wraps this project,
            also of models that fit no public layout; `gguf` for a file that llama.cpp runs; None for the format that
            `export` writes.
        quantize: Type of the matrices in a GGUF file: `f32`, `f16`, `bf16` or `q8_0`; None keeps their dtypes.
        max_shard_size: Bytes of a file with weights, at most; larger models are divided.
        ignore: Keys of config.json that are left out although this project does not know them, separated by commas; if
            they change what the model computes, the result is another model.
        trust: Whether to import and call what the model's config names, even if someone else wrote it.
        overwrite: Whether to replace a model of the same kind that was written there; other files in the folder stay,
            and another README.md becomes README.old.md.
        dry_run: Only show what each tensor, and each key of a public config.json, becomes.

    Returns:
        The folder, or the GGUF file.

    Raises:
        UserError: The checkpoint is unknown, incomplete, damaged or of a kind that cannot be converted, or the output
            holds something else or cannot be written.
    """
    folder, ignored = Path(output), names_in(ignore)
    if to == GGUF:
        check_type(quantize)
    elif quantize is not None:
        raise UserError(f"quantize: {quantize} is for to=gguf only; other layouts keep the dtypes of the weights.")
    kinds: dict[str | None, Kind] = {None: "an exported model", GGUF: "a GGUF file"}
    check_output(folder, kinds.get(to, "a public model"), overwrite, checkpoint)
    check_shard_size(max_shard_size)
    saved = SavedModel.open(checkpoint, trust, ignored)
    config = saved.config  # raises if there is nothing
    if to is None and not saved.is_public:
        raise UserError(
            f"to: null reads public checkpoints, and {checkpoint} is not one; "
            "choose fla, huggingface, transformers or gguf."
        )
    tokenizer = saved.tokenizer
    if tokenizer is None:
        log.warning("%s has no tokenizer.json, so the converted model has no tokenizer.", checkpoint)
    if to is None:
        texts = {CONFIG: dump_yaml(config)} | ({} if tokenizer is None else {TOKENIZER: tokenizer.to_json()})
        if dry_run:
            return show_plan(folder, rows_of(saved.weights), texts[CONFIG], described(saved.public_config, ignored))
        write_folder(folder, texts, saved.weights, max_shard_size, hashed=True, signature=sign(config))
        return folder
    model, weights = saved.on_meta()
    if to == GGUF:
        rows = write_gguf(folder, model, weights, tokenizer, _context_length(saved), quantize, dry_run)
        return show_plan(folder, rows) if dry_run else folder
    public = exported(model, weights, to)
    ends = {} if tokenizer is None else stop_config(tokenizer)
    texts = {PUBLIC_CONFIG: json.dumps({**public.config, **ends}, indent=2), **public.files}
    texts |= {} if tokenizer is None else tokenizer_files(tokenizer)
    texts[CARD] = _CARD.format(
        tags=", ".join(dict.fromkeys(type(mixer).__name__ for mixer in model.mixers)),
        name=folder.name,
        layers=model.num_layers,
        mixers=mixer_names(model),
        parameters=model.num_parameters(),
        layout=public.layout,
        load=_LOAD[public.target].format(name=folder.name),
    )
    if dry_run:
        return show_plan(folder, rows_of(public.weights), texts[PUBLIC_CONFIG])
    write_folder(folder, texts, public.weights, max_shard_size)
    return folder


def _context_length(saved: SavedModel) -> int:
    """Return the context that a model was made for: that of its training, or of its config.json."""
    if saved.is_public:
        inner = saved.public_config.get("text_config", saved.public_config)
        length = inner.get("max_position_embeddings") if isinstance(inner, Mapping) else None
    else:
        data = saved.config.get("data")
        arguments = data.get("init_args") if isinstance(data, Mapping) else None
        length = arguments.get("sequence_length") if isinstance(arguments, Mapping) else None
    return length if type(length) is int and length > 0 else _CONTEXT
