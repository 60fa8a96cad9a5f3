"""Small folders of published models: their own config.json with smaller sizes, and random weights.

`published.json` has the config.json of each, and where it was read.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .zoo_of_others import Oracle

PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
VOCABULARY = 97
_MAMBA = {"mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
_MAMBA2 = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8, "num_hidden_layers": 2}
_FLA = {"hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
# sizes by model_type, next to those of attention; "" has none
_SIZES: Mapping[str, dict[str, Any]] = {
    "": {"d_model": 32, "n_layer": 2, "vocab_size": VOCABULARY - 1},
    "mamba": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
    "mamba2": _MAMBA2,
    "gla": _FLA,
    "delta_net": _FLA,
    "gated_deltanet": {**_FLA, "head_dim": 8},
    "hgrn2": {**_FLA, "expand_ratio": 16},
    "retnet": _FLA,
    "rwkv7": {**_FLA, "head_dim": 16, "value_dim": [32, 32], "decay_low_rank_dim": 5, "a_low_rank_dim": 5}
    | {"v_low_rank_dim": 4, "gate_low_rank_dim": 6},
    "bamba": {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "attn_rotary_emb": 4},
    "granitemoehybrid": {**_MAMBA, "shared_intermediate_size": 80},
    "nemotron_h": {"mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8},
    "qwen3_5_text": {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "olmo_hybrid": {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 6}
    | {"linear_value_head_dim": 12},
}


def small(name: str) -> dict[str, Any]:
    """Return the published config.json of a model with smaller sizes; all other values stay."""
    config: dict[str, Any] = PUBLISHED[name]["config"]
    if "text_config" in config:
        return {**config, "text_config": _small(config["text_config"])}
    return _small(config)


def _small(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config.get("model_type", "")
    sizes = {"vocab_size": VOCABULARY} | ({} if "num_attention_heads" not in config else _attention(config))
    sizes |= _SIZES.get(kind, {"num_hidden_layers": 2})
    kinds = config.get("layer_types") or config.get("hybrid_override_pattern")
    if kinds:  # as many layers as it takes to have one of each kind
        count = next(i for i in range(1, len(kinds) + 1) if set(kinds[:i]) == set(kinds))
        key = "layer_types" if config.get("layer_types") else "hybrid_override_pattern"
        sizes |= {key: kinds[:count], "num_hidden_layers": count}
    if "mamba_d_head" in sizes:
        sizes["mamba_n_heads"] = 2 * sizes["hidden_size"] // sizes["mamba_d_head"]
    if kind == "mamba2":
        sizes["n_groups"] = min(config["n_groups"], 2)
    if kind == "qwen3_5_text":
        sizes["linear_num_value_heads"] = 2 * config["linear_num_value_heads"] // config["linear_num_key_heads"]
    tokens = {key: 1 for key in config if key.endswith("_token_id") and type(config[key]) is int}
    tokens |= {"pad_token_id": 0} if kind == "olmo_hybrid" else {}  # whose default is beyond this vocabulary
    return {**config, **{key: value for key, value in sizes.items() if key in config or key == "vocab_size"}, **tokens}


def _attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return small sizes with the published ratios of queries to keys, and of heads to the width of the model."""
    published, size = config["num_attention_heads"], config.get("head_dim") or 0
    share = published // config["num_key_value_heads"]
    heads = 2 * share if share > 1 else 4
    hidden = heads * 8 * config["hidden_size"] // (published * size) if size else heads * 8
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads // share,
        "hidden_size": hidden,
        "head_dim": 8,
        "intermediate_size": 80,
    }


def build(config: Mapping[str, Any], folder: Path, oracle: Oracle) -> Any:
    """Return the model that its project builds for the config.json in a folder, with every weight random."""
    transformers = oracle("transformers")
    if "model_type" not in config:  # the package of its authors needs a GPU
        multiple = config["pad_vocab_size_multiple"]
        size = {"hidden_size": config["d_model"], "num_hidden_layers": config["n_layer"]}
        size["vocab_size"] = math.ceil(config["vocab_size"] / multiple) * multiple
        if config["ssm_cfg"].get("layer") == "Mamba2":
            heads = {"num_heads": 2 * config["d_model"] // 64, "head_dim": 64, "n_groups": 1, "state_size": 128}
            theirs = transformers.Mamba2Config(**size, **heads, tie_word_embeddings=True)
            of_model = transformers.Mamba2ForCausalLM
        else:
            theirs, of_model = transformers.MambaConfig(**size), transformers.MambaForCausalLM
    elif oracle_of(config) == "fla":
        oracle("fla.models")  # which registers them
        theirs, of_model = (
            transformers.AutoConfig.from_pretrained(folder),
            transformers.AutoModelForCausalLM.from_config,
        )
    else:
        name: str = config["architectures"][0]
        of_model = getattr(transformers, name.replace("ForConditionalGeneration", "ForCausalLM"))
        theirs = of_model.config_class.from_pretrained(folder)
    torch.manual_seed(0)
    model = of_model(theirs).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1 or parameter.shape[0] == theirs.num_hidden_layers:  # norms, biases, bounds
            nn.init.uniform_(parameter, 0.3, 1.2)
        else:
            nn.init.normal_(parameter, std=0.2)
    model.tie_weights()
    return model


def oracle_of(config: Mapping[str, Any]) -> str:
    """Return the project whose model a config.json describes."""
    fla = ("gla", "delta_net", "gated_deltanet", "hgrn2", "retnet", "rwkv7")
    kind = config.get("model_type")
    return "fla" if kind in fla or (kind == "mamba2" and "norm_eps" in config) else "transformers"


def names(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights under the names of the published folder."""
    if "model_type" not in config:
        renamed = {name.replace("backbone.embeddings.", "backbone.embedding."): w for name, w in weights.items()}
        return {**renamed, "lm_head.weight": renamed["backbone.embedding.weight"]}
    if "text_config" in config:
        return {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}
    return dict(weights)


def store(weights: Mapping[str, Tensor], folder: Path, layout: str) -> None:
    """Write weights as `safetensors`, in `shards` of safetensors, as `bin`, or in shards of it, `bins`."""
    order = list(weights)
    if layout == "safetensors":
        save_file({name: weights[name].clone() for name in order}, folder / "model.safetensors")
    elif layout == "bin":
        torch.save(dict(weights), folder / "pytorch_model.bin")
    else:
        single = "model.safetensors" if layout == "shards" else "pytorch_model.bin"
        start, _, ending = single.rpartition(".")
        files = {name: f"{start}-0000{1 + (2 * i >= len(order))}-of-00002.{ending}" for i, name in enumerate(order)}
        for file in set(files.values()):
            part = {name: weights[name].clone() for name in order if files[name] == file}
            _ = save_file(part, folder / file) if layout == "shards" else torch.save(part, folder / file)
        (folder / f"{single}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
