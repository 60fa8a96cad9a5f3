"""Small hybrids of transformers: Qwen3.5, OLMo-Hybrid, Kimi Linear, Bamba, Granite 4 and Nemotron-H."""

from typing import Any

# of positions: sequences were of 24 tokens
SCALED = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 24}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 2.5}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
QWEN = {**SIZES, "head_dim": 16}
OLMO = {**SIZES, "pad_token_id": 0, "eos_token_id": 1}
KIMI = {
    **{key: SIZES[key] for key in SIZES if not key.startswith("linear_") and key != "num_key_value_heads"},
    **{"linear_num_heads": 3, "linear_head_dim": 8, "mlp_layer_types": ["dense"] * 4},
    **{"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12},
    **{"layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_key_value_heads": 4},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1},
}
TURNING = {"rope_type": "default", "rope_theta": 5e5}
BAMBA = {
    **{key: value for key, value in SIZES.items() if not key.startswith("linear_")},
    **{"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 8, "attn_layer_indices": [1, 2]},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1},
}
MULTIPLIERS = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 3.0}
GRANITE = {
    **{key: value for key, value in BAMBA.items() if key not in ("attn_layer_indices", "intermediate_size")},
    **{"shared_intermediate_size": 80, "num_local_experts": 0, "attention_multiplier": 0.07, **MULTIPLIERS},
    **{"layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"]},
}
NEMOTRON = {
    **{key: value for key, value in SIZES.items() if not key.startswith("linear_") and key != "num_hidden_layers"},
    **{"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"], "head_dim": 16},
    **{"mamba_num_heads": 6, "mamba_head_dim": 10, "ssm_state_size": 8, "n_groups": 2, "pad_token_id": 0},
    **{"bos_token_id": None, "eos_token_id": 1},
}
NEMOTRON_KINDS = ["linear_attention", "mlp", "full_attention"]
YARN = {"rope_type": "yarn", **SCALED}
# case, which begins with the name of the family without hf_ → a small config of transformers
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": QWEN,
    "qwen3_5, half of a head turns": QWEN | {"rope_parameters": {**TURNING, "partial_rotary_factor": 0.5}},
    "qwen3_5, yarn for half of a head": QWEN | {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    "qwen3_5, another order": QWEN
    | {"layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention"]},
    "qwen3_5, one key head": QWEN | {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 3},
    "qwen3_5, tied": QWEN | {"tie_word_embeddings": True},
    "qwen3_5, biases": QWEN | {"attention_bias": True, "num_key_value_heads": 1},
    "olmo_hybrid": OLMO,
    "olmo_hybrid, nothing turns": OLMO | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "olmo_hybrid, llama 3": OLMO | {"rope_parameters": SCALED | LLAMA3},
    "olmo_hybrid, all else": OLMO
    | {
        "rope_parameters": TURNING,
        "attention_bias": True,
        "linear_allow_neg_eigval": False,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-4,
    },
    "kimi_linear": KIMI,
    "kimi_linear, as published": KIMI
    | {"layer_types": None, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-3}
    | {"linear_attn_config": {"kda_layers": [2, 4], "full_attn_layers": [1, 3], "num_heads": 6, "head_dim": 4}},
    "bamba": BAMBA,
    "bamba, attention alone": BAMBA | {"attn_layer_indices": [0, 1, 2, 3]},
    "bamba, all else": BAMBA
    | {"mamba_n_groups": 1, "mamba_d_head": "auto", "mamba_conv_bias": False, "mamba_d_conv": 3}
    | {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-4, "attn_layer_indices": [0]}
    | {"rope_parameters": {**YARN, "partial_rotary_factor": 1.0}},
    "granite_hybrid": GRANITE,
    "granite_hybrid, attention alone": GRANITE
    | {"layer_types": ["attention"] * 4, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "granite_hybrid, rotary": GRANITE
    | {"position_embedding_type": "rope", "rope_parameters": TURNING, "logits_scaling": 7.3},
    "granite_hybrid, all else": GRANITE
    | {"mamba_n_groups": 1, "mamba_d_head": "auto", "mamba_conv_bias": False, "mamba_d_conv": 3}
    | {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-4, "embedding_multiplier": 1.0}
    | {"position_embedding_type": "rope", "rope_parameters": YARN, "layer_types": ["attention"] + ["mamba"] * 3},
    "nemotron_h": NEMOTRON,
    "nemotron_h, MLPs first": NEMOTRON | {"layers_block_type": None, "hybrid_override_pattern": "--M*M"},
    "nemotron_h, all else": NEMOTRON
    | {"n_groups": 3, "use_conv_bias": False, "conv_kernel": 3, "layer_norm_epsilon": 1e-3}
    | {"num_key_value_heads": 1, "head_dim": 6, "layers_block_type": ["attention", "mamba", "mlp", "attention"]},
}
CASES = {case: (case.partition(",")[0], config) for case, config in CONFIGS.items()}
CLASSES = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM"),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "bamba": ("BambaConfig", "BambaForCausalLM"),
    "granite_hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM"),
}
# transformers renames or joins weights when it saves a model, and back when it loads one: loaded models are compared
RENAMED = ("hf_olmo_hybrid", "hf_kimi_linear")
