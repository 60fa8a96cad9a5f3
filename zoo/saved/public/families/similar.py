"""Models of flash-linear-attention (FLA) that benchmarks compare with ours, and that `convert` does not write.

Their sizes are those of our models. Some have less in a layer: FLA's forgetting attention does not shift keys.
"""

from collections.abc import Callable
from typing import Any

# our mixer → FLA's class, and the keys of its config that describe the mixer
SIMILAR: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "RWKV7": (
        "RWKV7ForCausalLM",
        # null for the same ranks as ours
        lambda mixer: (
            {"head_dim": mixer.key_size}
            | dict.fromkeys((f"{part}_low_rank_dim" for part in ("decay", "gate", "a", "v")), None)
        ),
    ),
    "GatedSlotAttention": (
        "GSAForCausalLM",
        lambda mixer: {"num_heads": mixer.num_heads, "num_slots": mixer.num_slots},
    ),
    "ForgettingAttention": (
        "ForgettingTransformerForCausalLM",
        lambda mixer: {
            "num_heads": mixer.num_heads,
            "num_kv_heads": mixer.num_kv_heads,
            "qk_norm": mixer.q_norm is not None,
            "use_output_gate": mixer.o_norm is not None and mixer.o_norm.gated,
        },
    ),
    "MultiheadLatentAttention": (
        "MLAForCausalLM",
        lambda mixer: {
            "num_heads": mixer.num_heads,
            "q_lora_rank": None if mixer.q_norm is None else mixer.q_up.in_features,
            "kv_lora_rank": mixer.kv_rank,
            "qk_rope_head_dim": mixer.rope_dim,
            "qk_nope_head_dim": mixer.head_dim,
            "qk_head_dim": mixer.head_dim + mixer.rope_dim,
            "v_head_dim": mixer.value_dim,
        },
    ),
}
