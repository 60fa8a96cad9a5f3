"""The model card of a converted model: README.md, as Hugging Face shows it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zoo.lm.model import LanguageModel
from zoo.lm.size_table import mixer_names
from zoo.saved.public.family import Exported
from zoo.train.results import read_row

_CARD = """\
---
library_name: {library}
pipeline_tag: text-generation
tags: [{tags}]
---

# {name}

A language model of {mixers}, trained and converted by the token-mixer zoo. What nobody but you knows is marked *to be
filled in*.

| | |
|---|---|
{rows}

## Load it

```python
{load}
```

{needs}

## Use and limits

*To be filled in*: what it is meant for, what it was tested on, and what it must not be used for.
"""
_TRANSFORMERS = """\
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}\""""
# whose from_pretrained reads pickles only; a tied head is stored once
_MAMBA_SSM = """\
import json
from dataclasses import fields

from mamba_ssm.models.config_mamba import MambaConfig
from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel
from safetensors.torch import load_file

keys = {{field.name for field in fields(MambaConfig)}}
config = json.load(open("{name}/config.json"))
model = MambaLMHeadModel(MambaConfig(**{{key: config[key] for key in keys & config.keys()}}), device="cuda")
model.load_state_dict(load_file("{name}/model.safetensors"), strict=not config["tie_embeddings"])"""
_LOAD = {
    "fla": f"import fla  # registers the architecture\n{_TRANSFORMERS})",
    "huggingface": f"{_TRANSFORMERS})",
    "mamba_ssm": _MAMBA_SSM,
    "transformers": f"{_TRANSFORMERS}, trust_remote_code=True)",
    "zoo": 'import zoo\n\nmodel = zoo.load("{name}")',
}
_IN_THE_ZOO = 'In the zoo itself: `zoo.load("{name}")`.'
_NEEDS = {
    "zoo": "It needs the token-mixer zoo, whose format this is.",
    "fla": f"It needs `pip install flash-linear-attention` and a GPU. {_IN_THE_ZOO}",
    "huggingface": _IN_THE_ZOO,
    "mamba_ssm": f"It needs `pip install mamba-ssm` from source and a GPU. {_IN_THE_ZOO}",
    "transformers": "Its code, in plain PyTorch, is in the folder; read it before you trust it.",
}


def model_card(
    name: str, model: LanguageModel, config: Mapping[str, Any], checkpoint: Path, exported: Exported | None
) -> str:
    """Return the text of a model card.

    Args:
        name: The name of the folder, and so of the model.
        model: The model; may be on the meta device.
        config: The config of its run.
        checkpoint: Where it comes from. Only a run's folder has results, which are those of its last checkpoint.
        exported: What it was converted to; None for the format that `export` writes.
    """
    target = "zoo" if exported is None else exported.target
    row = (read_row(checkpoint) if checkpoint.is_dir() else None) or {}
    state, unknown = model.state_size(), "*to be filled in*"
    initial = (config.get("optim") or {}).get("initial_weights")
    start = "" if initial is None else f", after those of `{Path(initial).name}`, whose weights it started from"
    grows = "grows with the text" if math.isinf(state) else f"{state:,} numbers, whatever the length of the text"
    rows = {
        "layers": f"{model.num_layers} of {mixer_names(model)}, {model.hidden_size} channels wide",
        "parameters": f"{model.num_parameters():,}",
        "state of a sequence": grows,
        "vocabulary": f"{model.vocab_size:,} tokens",
        "trained on": f"{row['tokens_seen']:,} tokens{start}" if "tokens_seen" in row else unknown,
        "context in training": f"{row['context_length']:,} tokens" if "context_length" in row else unknown,
        "data": _sources(config.get("data") or {}) or unknown,
        "validation loss": _loss(row) or unknown,
        "converted from": f"`{checkpoint.name}`, to the layout `{'zoo' if exported is None else exported.layout}`",
        "licence": f"{unknown}, also as `license:` at the top of this file",
    }
    return _CARD.format(
        name=name,
        tags=", ".join(dict.fromkeys(type(mixer).__name__ for mixer in model.mixers)),
        mixers=mixer_names(model),
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        library={"zoo": "token-mixer-zoo", "mamba_ssm": "mamba-ssm"}.get(target, "transformers"),
        load=_LOAD[target].format(name=name),
        needs=_NEEDS[target].format(name=name),
    )


def _sources(data: Mapping[str, Any]) -> str:
    """Return the sources of the training data that the config names, or the data module's class if it reads no text."""
    arguments = data.get("init_args") or {}
    parts = arguments["sources"].values() if isinstance(arguments.get("sources"), Mapping) else [arguments]
    paths = [part["path"] for part in parts if "path" in part]
    names = [path for value in paths for path in (value if isinstance(value, list) else [value])]
    if not names:
        return data.get("class_path", "").rpartition(".")[2]
    return ", ".join("Python's own library and documentation" if path is None else f"`{path}`" for path in names)


def _loss(row: Mapping[str, Any]) -> str:
    if row.get("val_loss") is None:
        return ""
    bigram = row.get("bigram_loss")
    comparison = "" if bigram is None else f" (an interpolated bigram model: {bigram:.3f})"
    return f"{row['val_loss']:.3f} nats per token over {row.get('val_batches', '?')} batches{comparison}"
