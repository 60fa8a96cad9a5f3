"""Small models of other projects with random weights, and folders that they save."""

import importlib
import inspect
import re
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from . import hybrids
from .hybrids import LLAMA3, SCALED

Oracle = Callable[[str], ModuleType]

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 97}
FLA = {**SIZES, "intermediate_size": 96, "norm_eps": 1e-4}
LLAMA = {**SIZES, "intermediate_size": 96, "num_attention_heads": 4, "rms_norm_eps": 1e-4}
WINDOW = {"num_heads": 4, "num_kv_heads": 2, "window_size": 6}  # of the attention of hybrids
RWKV7 = {"head_dim": 32, "decay_low_rank_dim": 5, "a_low_rank_dim": 5, "v_low_rank_dim": 4, "gate_low_rank_dim": 6}
# name → config class, what it has beside FLA or LLAMA
OF_FLA: dict[str, tuple[str, dict[str, Any]]] = {
    "gla": ("GLA", {"num_heads": 2}),
    "gla, convolved and tied": (
        "GLA",
        {"num_heads": 2, "use_short_conv": True, "expand_k": 1.0, "tie_word_embeddings": True},
    ),
    "gla, no gate": ("GLA", {"num_heads": 2, "use_output_gate": False}),
    "gla, hybrid": ("GLA", {"num_heads": 2, "attn": {"layers": [1], "num_heads": 4}}),
    "gla, hybrid of three": (
        "GLA",
        {
            "num_hidden_layers": 4,
            "num_heads": 2,
            "use_output_gate": False,
            "attn": [
                {"layers": [3, 1], "num_heads": 4, "num_kv_heads": 1, "qkv_bias": True, "window_size": 5},
                {"layers": [0], "num_heads": 2, "rope_theta": 500.0},
            ],
        },
    ),
    "gated deltanet, hybrid": ("GatedDeltaNet", {"num_heads": 2, "head_dim": 16, "attn": {**WINDOW, "layers": [0, 2]}}),
    "deltanet, hybrid": ("DeltaNet", {"num_heads": 2, "attn": {**WINDOW, "layers": [2]}}),
    "hgrn2, hybrid": ("HGRN2", {"expand_ratio": 16, "attn": {**WINDOW, "layers": [0]}}),
    "retnet, no gate": ("RetNet", {"num_heads": 2, "use_output_gate": False}),
    "retnet, hybrid": ("RetNet", {"num_heads": 2, "attn": {**WINDOW, "layers": [1]}}),
    "gated deltanet": ("GatedDeltaNet", {"num_heads": 2, "head_dim": 16}),
    "gated deltanet, grouped": (
        "GatedDeltaNet",
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "expand_v": 1.0, "allow_neg_eigval": True},
    ),
    "gated deltanet, no gate": ("GatedDeltaNet", {"num_heads": 2, "head_dim": 16, "use_gate": False}),
    "deltanet": ("DeltaNet", {"num_heads": 2}),
    "deltanet, gated": ("DeltaNet", {"num_heads": 2, "use_gate": True, "allow_neg_eigval": True}),
    "deltanet, wide values": ("DeltaNet", {"num_heads": 2, "expand_v": 2.0, "tie_word_embeddings": True}),
    "kda": ("KDA", {"num_heads": 2, "head_dim": 16}),
    "kda, grouped and bounded": (
        "KDA",
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "expand_v": 0.5, "allow_neg_eigval": True}
        | {"safe_gate": True, "lower_bound": -4.0, "tie_word_embeddings": True},
    ),
    "kda, hybrid": ("KDA", {"num_heads": 2, "head_dim": 16, "attn": {**WINDOW, "layers": [2]}}),
    "comba": ("Comba", {"num_heads": 2, "head_dim": 16}),
    "comba, grouped": (
        "Comba",
        {"num_heads": 2, "num_v_heads": 4, "head_dim": 16, "expand_v": 1.0, "correction_factor": 0.02},
    ),
    "comba, no gate": ("Comba", {"num_heads": 2, "head_dim": 16, "use_output_gate": False}),
    "deltaproduct, one step": ("GatedDeltaProduct", {"num_heads": 2, "head_dim": 16}),
    "deltaproduct": (
        "GatedDeltaProduct",
        {"num_heads": 2, "head_dim": 16, "num_householder": 3, "use_forget_gate": True}
        | {"allow_neg_eigval": True, "expand_v": 1.0},
    ),
    "deltaproduct, no gate": (
        "GatedDeltaProduct",
        {"num_heads": 2, "head_dim": 16, "num_householder": 2, "use_output_gate": False}
        | {"attn": {**WINDOW, "layers": [0]}},
    ),
    "hgrn2": ("HGRN2", {"expand_ratio": 16}),
    "hgrn2, convolved": ("HGRN2", {"expand_ratio": 32, "use_short_conv": True, "use_lower_bound": False}),
    "retnet": ("RetNet", {"num_heads": 2}),
    "retnet, narrow and tied": (
        "RetNet",
        {"num_heads": 2, "use_short_conv": True, "expand_v": 1.0, "tie_word_embeddings": True},
    ),
    "rwkv7": ("RWKV7", {**RWKV7, "fuse_norm": False}),
    "rwkv7, tied": (
        "RWKV7",
        {**RWKV7, "norm_first": False, "tie_word_embeddings": True, "decay_low_rank_dim": None}
        | {"a_low_rank_dim": None, "v_low_rank_dim": None, "gate_low_rank_dim": None, "intermediate_size": None},
    ),
}
LIKE_LLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "llama, biased and tied": ("Llama", {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 8}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
    "mistral, no window": ("Mistral", {"num_key_value_heads": 4, "sliding_window": None}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "llama 3.1": ("Llama", {"num_key_value_heads": 2, "rope_parameters": SCALED | LLAMA3}),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e5}}),
    "mistral, yarn": (
        "Mistral",
        {"num_key_value_heads": 2, "sliding_window": 9, "rope_parameters": SCALED | {"rope_type": "yarn"}},
    ),
    "qwen2, all of yarn": (
        "Qwen2",
        {
            "num_key_value_heads": 2,
            "rope_parameters": SCALED
            | {"rope_type": "yarn", "beta_fast": 3.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 0.3}
            | {"truncate": False},
        },
    ),
    "qwen2, windows": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen2, windows in another order": (
        "Qwen2",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 6, "tie_word_embeddings": True}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 24}),
    "qwen3, windows, biased and tied": (
        "Qwen3",
        {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
        | {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
}
# name → package, config class, its arguments
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{case: ("fla", f"{name}Config", FLA | arguments) for case, (name, arguments) in OF_FLA.items()},
    **{case: ("transformers", f"{name}Config", LLAMA | arguments) for case, (name, arguments) in LIKE_LLAMA.items()},
    "fla mamba2": ("fla", "Mamba2Config", {**SIZES, "head_dim": 16, "state_size": 16, "n_groups": 2, "norm_eps": 1e-4}),
    "mamba": ("transformers", "MambaConfig", {**SIZES, "layer_norm_epsilon": 1e-4}),
    "mamba, no bias": (
        "transformers",
        "MambaConfig",
        {**SIZES, "use_conv_bias": False, "tie_word_embeddings": False, "time_step_rank": 3, "state_size": 8},
    ),
    "mamba2": (
        "transformers",
        "Mamba2Config",
        {**SIZES, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "layer_norm_epsilon": 1e-4},
    ),
    "mamba2, tied": (
        "transformers",
        "Mamba2Config",
        {**SIZES, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "tie_word_embeddings": True},
    ),
}
CASES |= {
    case: ("transformers", hybrids.CLASSES[name][0], arguments) for case, (name, arguments) in hybrids.CASES.items()
}


def in_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models of transformers compute what their loops over time in PyTorch do."""
    # Wherever flash-linear-attention is installed, theirs would call its kernels: take the PyTorch functions behind.
    # And of two the loop over time, because the chunked one sums decays in fp32 and loses digits.
    for name in ("qwen3_5", "olmo_hybrid", "kimi_linear"):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        rule = "kimi_delta_attention" if name == "kimi_linear" else "gated_delta_rule"
        prefix = "" if name == "kimi_linear" else "torch_"
        for function in (f"{prefix}recurrent_{rule}", "causal_conv1d_fn", "causal_conv1d_update"):
            monkeypatch.setattr(module, function, inspect.unwrap(getattr(module, function)))
        monkeypatch.setattr(module, f"{prefix}chunk_{rule}", getattr(module, f"{prefix}recurrent_{rule}"))

    # Their prefill of Nemotron-H raises small steps of time to `time_step_min`; their decoding does not.
    mamba2 = importlib.import_module("transformers.models.nemotron_h.modeling_nemotron_h").NemotronHMamba2Mixer
    no_limit = property(lambda self: (0.0, inf), lambda self, value: None)
    monkeypatch.setattr(mamba2, "time_step_limit", no_limit, raising=False)


def build(case: str, oracle: Oracle, **changes: Any) -> Any:
    """A model of a case, with every weight random; `oracle` imports its project."""
    package, name, arguments = CASES[case]
    module = oracle("fla.models" if package == "fla" else "transformers")
    if "attn" in arguments and (attention := oracle("fla.layers.attn")).flash_attn_func is None:
        attention.flash_attn_func = window_attention  # otherwise their attention cannot even be built
    config = getattr(module, name)(**{**arguments, **changes})
    torch.manual_seed(len(case))
    model = getattr(module, re.sub("(Text)?Config", "ForCausalLM", name))(config).eval()
    for parameter in model.parameters():
        if case in hybrids.CASES:  # whose layers would magnify rounding errors
            nn.init.normal_(noise := torch.empty_like(parameter), std=0.1)
            parameter.data += noise
        elif parameter.dim() == 1 or parameter.shape[0] == config.num_hidden_layers:  # norms, biases, bounds
            nn.init.uniform_(parameter, 0.3, 1.2)
        else:
            nn.init.normal_(parameter, std=0.2)
    model.tie_weights()
    return model


def window_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size: tuple[int, int]) -> Tensor:
    """In place of the function of the package flash-attn: q [B,T,H,D], k and v [B,T,Hkv,D], as many as queries."""
    assert causal
    behind = torch.arange(q.shape[1], device=q.device)
    behind = behind[:, None] - behind
    seen = (behind >= 0) & (behind <= (window_size[0] if window_size[0] >= 0 else len(behind)))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)


def save(model: Any, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Save a model as its project does, and return what is in its files."""
    model.save_pretrained(folder, **options)
    return stored(folder)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors in the files of a folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
