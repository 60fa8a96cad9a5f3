"""A small folder as flash-linear-attention saves a GLA, written by hand."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

HIDDEN, VOCABULARY, LAYERS = 32, 260, 2
CONFIG = {
    "architectures": ["GLAForCausalLM"],
    "model_type": "gla",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 256,
    "transformers_version": "4.40.0",
}


def tensors(layers: int = LAYERS, inner: int = 48) -> dict[str, Tensor]:
    """Its weights; `inner` is the inner size of its MLPs."""
    mixer = {"q_proj": (16, 32), "k_proj": (16, 32), "v_proj": (32, 32), "g_proj": (32, 32), "o_proj": (32, 32)}
    shapes = {"gk_proj.0": (16, 32), "gk_proj.1": (16, 16), "g_norm_swish_gate": (16,), **mixer}
    layer = {f"attn.{name}.weight": shape for name, shape in shapes.items()} | {
        "attn.gk_proj.1.bias": (16,),
        "attn_norm.weight": (32,),
        "mlp_norm.weight": (32,),
        "mlp.gate_proj.weight": (inner, 32),
        "mlp.up_proj.weight": (inner, 32),
        "mlp.down_proj.weight": (32, inner),
    }
    whole = {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()} | {
        "model.embeddings.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in whole.items()}


def write(
    folder: Path, weights: dict[str, Tensor] | None = None, shards: int = 1, tokenizer: bool = True, **config: Any
) -> Path:
    """Write it, with changes; a key of None in `config` is written as null."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    weights = tensors() if weights is None else weights
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
    else:
        place = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(weights)}
        for file in set(place.values()):
            save_file({name: weights[name] for name in weights if place[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    if tokenizer:
        byte_level().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<done>"}}))
    return folder


def byte_level() -> tokenizers.Tokenizer:
    """A tokenizer of all bytes, a token `<done>` that ends documents and one that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<done>"])
    made.add_tokens(["hello"])
    return made
