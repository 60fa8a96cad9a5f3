"""xLSTM-large of transformers and of the package xlstm: mLSTM and SwiGLU, with soft caps of gates and logits."""

import math
from typing import Any

from mixers import MLSTM
from mixers.mlstm import EPS
from zoo.lm.model import LanguageModel
from zoo.saved.public.family import (
    TIED,
    Config,
    Family,
    check_kind,
    component,
    keys_of,
    mlp_size,
    model_of,
    refusal,
    words,
)
from zoo.saved.public.tensors import Recut, around_layers, table

_LAYER = "backbone.blocks.{layer}."
_GATES, _CAP, _MIXER = "gate_soft_cap", "output_logit_soft_cap", "mlstm_layer."
_KEYS: Config = (
    dict(vocab_size=50304, hidden_size=None, embedding_dim=None, num_hidden_layers=None, num_blocks=None)
    | dict(num_heads=8, qk_dim_factor=0.5, v_dim_factor=1.0, norm_eps=1e-6)
    | dict(ffn_proj_factor=2.667, ffn_round_up_to_multiple_of=64)
    | {_GATES: 15.0, _CAP: 30.0, TIED: False}
)
# two names of each → the size where config.json has neither
_SIZES = {("hidden_size", "embedding_dim"): 4096, ("num_hidden_layers", "num_blocks"): 32}


def _to_ours(config: Config) -> dict[str, Any]:
    sizes = {}
    for (name, other), default in _SIZES.items():
        check_kind(name, config[name], default)
        check_kind(other, config[other], default)
        size = next((config[key] for key in (name, other) if config[key] is not None), default)
        if config[other] not in (None, size):
            raise refusal(other, config[other], f"{name}, {size}")
        sizes[name] = size
    if config[TIED]:  # transformers would not tie them
        raise refusal(TIED, True, "false")
    for key in (_GATES, _CAP):
        if config[key] is None:
            raise refusal(key, None, "a number above 0")
    size, heads, multiple = sizes["hidden_size"], config["num_heads"], config["ffn_round_up_to_multiple_of"]
    mixer = component(
        "MLSTM",
        num_heads=heads,
        expand_k=int(size * config["qk_dim_factor"]) / size,
        expand_v=int(size * config["v_dim_factor"]) / size,
        gate_cap=config[_GATES],
        norm_eps=config["norm_eps"],
    )
    return model_of(
        {**config, **sizes},
        config["norm_eps"],
        component("Uniform", mixer=mixer),
        num_heads=heads,
        intermediate_size=int((size * config["ffn_proj_factor"] + multiple - 1) // multiple * multiple),
        logit_cap=config[_CAP],
    )


def _to_theirs(model: LanguageModel) -> dict[str, Any]:
    mixer = model.mixers[0]
    assert isinstance(mixer, MLSTM)
    size, widths = model.hidden_size, mixer.in_proj.widths
    return {
        **keys_of(model, "norm_eps", without_tokens=True),
        "embedding_dim": size,
        "num_blocks": model.num_layers,
        "num_heads": mixer.num_heads,
        "qk_dim_factor": _factor(widths["q"], size),
        "v_dim_factor": _factor(widths["v"], size),
        "ffn_proj_factor": _factor(mlp_size(model) or 1, size),
        "ffn_round_up_to_multiple_of": 1,
        _GATES: mixer.gate.cap,
        _CAP: model.logit_cap,
    }


def _factor(width: int, size: int) -> float:
    """The factor of a size whose product, rounded down, is a width."""
    factor = width / size
    return factor if int(size * factor) == width else math.nextafter(factor, math.inf)


_NAMES = {
    "norm_mlstm.weight": "mixer_norm.weight",
    "norm_ffn.weight": "mlp_norm.weight",
    **{f"{_MIXER}{x}.weight": f"mixer.in_proj.{x}.weight" for x in "qkv"},
    **{f"{_MIXER}{x}gate_preact.weight": f"mixer.in_proj.{ours}.weight" for x, ours in zip("oif", "gif", strict=True)},
    f"{_MIXER}igate_preact.bias": "mixer.gate.input_bias",
    f"{_MIXER}fgate_preact.bias": "mixer.gate.forget_bias",
    f"{_MIXER}multihead_norm.weight": "mixer.o_norm.weight",
    f"{_MIXER}out_proj.weight": "mixer.o_proj.weight",
    "ffn.proj_up_gate.weight": "mlp.in_proj.gate.weight",
    "ffn.proj_up.weight": "mlp.in_proj.up.weight",
    "ffn.proj_down.weight": "mlp.down_proj.weight",
}
# of weight_mode "fused": one tensor → those whose rows it has
_FUSED = {
    f"{_MIXER}qkv_opreact.weight": [f"{_MIXER}{x}.weight" for x in ("q", "k", "v", "ogate_preact")],
    **{f"{_MIXER}ifgate_preact.{x}": [f"{_MIXER}{gate}gate_preact.{x}" for gate in "if"] for x in ("weight", "bias")},
    "ffn.proj_up_gate_z.weight": ["ffn.proj_up_gate.weight", "ffn.proj_up.weight"],
}

FAMILIES = (
    Family(
        name="hf_xlstm",
        target="huggingface",
        model_types=("xlstm",),
        architecture="xLSTMForCausalLM",
        mixers=frozenset({"MLSTM"}),
        keys=_KEYS,
        fixed={"weight_mode": ("single", "fused"), "use_bias": (False,), "add_out_norm": (True,), "eps": (EPS,)},
        # kernels and the dtypes they compute in
        harmless=words("""
            autocast_kernel_dtype chunk_size chunkwise_kernel head_dim inference_state_dtype max_inference_chunksize
            mode norm_reduction_force_float32 return_last_states sequence_kernel step_kernel
        """),
        to_ours=_to_ours,
        to_theirs=_to_theirs,
        tensors=around_layers("backbone.embeddings.weight", "backbone.out_norm.weight"),
        layer_tensors=(
            *table(_NAMES, _LAYER),
            *(Recut(tuple(_LAYER + part for part in parts), _LAYER + whole) for whole, parts in _FUSED.items()),
        ),
    ),
)
