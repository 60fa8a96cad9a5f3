"""RWKV-7 in the layout of flash-linear-attention."""

from collections.abc import Mapping
from typing import Any

from mixers import RWKV7
from zoo.lm import RWKV7ChannelMix
from zoo.lm.model import LanguageModel
from zoo.saved.public.families.fla_layout import HARMLESS
from zoo.saved.public.family import TIED, Config, Family, component, keys_of, model_of, refusal
from zoo.saved.public.tensors import LAYER, OUR_LAYER, Recut, Rows, Rule, Stacked, around_layers, table

# theirs → factors of √hidden_size that a rank of null is made from, and whether it grows with the size of a head
_RANKS: Mapping[str, tuple[float, bool]] = {
    "decay_low_rank_dim": (2.5, True),
    "a_low_rank_dim": (2.5, True),
    "v_low_rank_dim": (1.7, True),
    "gate_low_rank_dim": (5, False),
}
_KEYS: Config = (
    dict(vocab_size=32000, hidden_size=2048, num_hidden_layers=24, hidden_ratio=4.0, intermediate_size=None)
    | dict(head_dim=64, num_heads=None, value_dim=None, norm_first=True, norm_eps=1e-5)
    | dict(decay_low_rank_dim=64, a_low_rank_dim=64, v_low_rank_dim=16, gate_low_rank_dim=128)
    | {TIED: False}
)


def _to_ours(config: Config) -> dict[str, Any]:
    size, count = config["hidden_size"], config["num_hidden_layers"]
    head = config["head_dim"] or size // (config["num_heads"] or 1)
    if size % head or config["num_heads"] not in (None, size // head):
        raise refusal("num_heads", config["num_heads"], f"hidden_size / head_dim, {size} / {head}")
    if config["value_dim"] not in (None, size, [size] * count):
        raise refusal("value_dim", config["value_dim"], f"hidden_size {size} in all layers")
    ranks = {key: _rank(key, config, head) for key in _RANKS}
    if ranks["a_low_rank_dim"] != ranks["decay_low_rank_dim"]:
        raise refusal("a_low_rank_dim", ranks["a_low_rank_dim"], f"decay_low_rank_dim, {ranks['decay_low_rank_dim']}")
    inner = config["intermediate_size"]
    if inner is None:
        ratio = 4 if config["hidden_ratio"] is None else config["hidden_ratio"]
        inner = -(int(size * ratio) // -32) * 32
    mixer = component(
        "RWKV7",
        head_dim=head,
        rate_rank=ranks["decay_low_rank_dim"],
        value_rank=ranks["v_low_rank_dim"],
        gate_rank=ranks["gate_low_rank_dim"],
        norm_eps=config["norm_eps"] * head,
    )
    others = {"mlp": "RWKV7ChannelMix", "norm": "LayerNorm", "embedding_norm": config["norm_first"]}
    stack = component("Uniform", mixer=mixer)
    return model_of(config, config["norm_eps"], stack, intermediate_size=inner, **others)


def _rank(key: str, config: Config, head: int) -> int:
    if config[key] is not None:
        return config[key]
    factor, grows = _RANKS[key]
    return max(32, round(factor * config["hidden_size"] ** 0.5 * (head / 64 if grows else 1) / 32) * 32)


def _to_theirs(model: LanguageModel) -> dict[str, Any]:
    lowest, above = model.mixers[0], model.mixers[-1]
    assert isinstance(lowest, RWKV7)
    assert isinstance(above, RWKV7)
    mlp = model.mlps[0] if model.mlps else None
    rates = lowest.rate.down.out_features
    return {
        **keys_of(model, "norm_eps"),
        "head_dim": lowest.key_size,
        "num_heads": lowest.num_heads,
        "norm_first": model.embedding_norm is not None,
        "intermediate_size": mlp.up_proj.out_features if isinstance(mlp, RWKV7ChannelMix) else None,
        "decay_low_rank_dim": rates,
        "a_low_rank_dim": rates,
        "gate_low_rank_dim": lowest.g.down.out_features,
        **({} if above.value is None else {"v_low_rank_dim": above.value.down.out_features}),
    }


def _low_rank(theirs: str, ours: str, bias: str | None = None) -> dict[str, str]:
    names = {f"attn.{theirs}_lora.lora.{place}.weight": f"mixer.{ours}.{part}.weight" for place, part in _PLACES}
    return names if bias is None else {**names, f"attn.{theirs}_lora.lora.2.bias": f"mixer.{bias}"}


_PLACES = ((0, "down"), (2, "up"))
_PARTS = ("weight", "bias")
_NAMES = {
    **{f"attn_norm.{part}": f"mixer_norm.{part}" for part in _PARTS},
    **{f"ffn_norm.{part}": f"mlp_norm.{part}" for part in _PARTS},
    **{f"attn.{x}_proj.weight": f"mixer.{x}_proj.weight" for x in "rkvo"},
    **{f"attn.{name}": f"mixer.{name}" for name in ("k_k", "k_a")},
    **_low_rank("w", "decay", "decay_bias"),
    **_low_rank("a", "rate", "rate_bias"),
    **_low_rank("v", "value", "value_bias"),
    **_low_rank("g", "g"),
    "ffn.x_k": "mlp.mix",
    "ffn.key.weight": "mlp.up_proj.weight",
    "ffn.value.weight": "mlp.down_proj.weight",
}
_MIX: tuple[Rule, ...] = (
    Stacked(tuple(f"{LAYER}attn.x_{x}" for x in "rwkvag"), f"{OUR_LAYER}mixer.mix", (1, 1, -1)),
    Recut(tuple(f"{LAYER}attn.x_{x}" for x in "rwkvag"), f"{LAYER}attn.x_x"),  # of older versions
)

FAMILIES = (
    Family(
        name="fla_rwkv7",
        target="fla",
        model_types=("rwkv7",),
        architecture="RWKV7ForCausalLM",
        mixers=frozenset({"RWKV7"}),
        keys=_KEYS,
        # their attention gives its block a result too few
        fixed=dict(hidden_act=("sqrelu",), norm_bias=(True,), attn=(None,)),
        harmless=HARMLESS,
        # which older versions have in the lowest layer as well
        ignored=(r"^model\.layers\.0\.attn\.v_lora\.",),
        to_ours=_to_ours,
        to_theirs=_to_theirs,
        tensors=(
            *around_layers("model.embeddings.weight", "model.norm.weight"),
            Rows("model.norm.bias", ("norm.bias",)),
            *(Rows(f"model.layers.0.pre_norm.{part}", (f"embedding_norm.{part}",)) for part in _PARTS),
        ),
        layer_tensors=(
            *table(_NAMES),
            *_MIX,
            Rows(f"{LAYER}attn.r_k", (f"{OUR_LAYER}mixer.r_k",), shape=("num_heads", -1)),
            *(Rows(f"{LAYER}attn.g_norm.{part}", (f"{OUR_LAYER}mixer.o_norm.{part}",), shape=(-1,)) for part in _PARTS),
        ),
    ),
)
