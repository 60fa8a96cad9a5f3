"""Models of flash-linear-attention (FLA) that benchmarks compare with ours, and that `convert` does not write.

Their sizes are those of our models. Some have less in a layer: FLA's forgetting attention does not shift keys.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Similar(NamedTuple):
    """A class of FLA, and the keys of its config that describe the mixer of this project."""

    architecture: str
    keys: Callable[[Any], dict[str, Any]]
    has_mlps: bool = True


SIMILAR: dict[str, Similar] = {
    "RWKV7": Similar(
        "RWKV7ForCausalLM",
        # null for the same ranks as ours
        lambda mixer: (
            {"head_dim": mixer.key_size}
            | dict.fromkeys((f"{part}_low_rank_dim" for part in ("decay", "gate", "a", "v")), None)
        ),
    ),
    "GatedSlotAttention": Similar(
        "GSAForCausalLM",
        lambda mixer: {"num_heads": mixer.num_heads, "num_slots": mixer.num_slots},
    ),
    "ForgettingAttention": Similar(
        "ForgettingTransformerForCausalLM",
        lambda mixer: {
            "num_heads": mixer.num_heads,
            "num_kv_heads": mixer.num_kv_heads,
            "qk_norm": mixer.q_norm is not None,
            "use_output_gate": mixer.o_norm is not None and mixer.o_norm.gated,
        },
    ),
    "MultiheadLatentAttention": Similar(
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
    # FLA's rate A is softplus(a). It runs the kernels of mamba_ssm, which must be installed.
    "Mamba3": Similar(
        "Mamba3ForCausalLM",
        lambda mixer: {
            "head_dim": mixer.value_size,
            "state_size": mixer.key_size,
            "expand": mixer.num_heads * mixer.value_size / mixer.site.hidden_size,
            "n_groups": mixer.num_key_heads,
            "rope_fraction": 2 * mixer.pairs / mixer.key_size,
        },
        has_mlps=False,
    ),
}
