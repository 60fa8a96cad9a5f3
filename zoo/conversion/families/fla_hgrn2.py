"""HGRN2 of flash-linear-attention."""

from typing import Any

from zoo.conversion import fla, fla_attention
from zoo.conversion.family import Config, Family, refusal
from zoo.conversion.rules import Shared
from zoo.lm.model import LanguageModel

EPS = 1e-5  # of the norm before the output projection, whatever norm_eps says


def to_ours(config: Config) -> dict[str, Any]:
    size, heads = config["expand_ratio"], config["num_heads"]
    if size is None and heads is not None:
        size = config["hidden_size"] // heads
    if not size or config["hidden_size"] % size:
        raise refusal("expand_ratio", size, f"a divisor of hidden_size {config['hidden_size']}")
    taps = config["conv_size"] if config["use_short_conv"] else 0
    return fla.model_of(
        config,
        "HGRN2",
        head_dim=size,
        q={"conv": taps, "activation": "silu"},
        k={"conv": taps},
        v={"conv": taps},
        lower_bounds="LowerBounds" if config["use_lower_bound"] else None,
        norm_eps=EPS,
    )


def to_theirs(model: LanguageModel) -> dict[str, Any]:
    mixer: Any = fla_attention.linear_mixers(model)[-1]
    return {
        **fla.keys_of(model),
        "num_heads": mixer.num_heads,
        "expand_ratio": mixer.key_size,
        "use_lower_bound": mixer.lower_bounds is not None,
        **fla.convolution_of(mixer.q_features.spec),
    }


FAMILY = Family(
    name="fla_hgrn2",
    target="fla",
    model_types=("hgrn2",),
    architecture="HGRN2ForCausalLM",
    mixers=frozenset({"HGRN2"}) | fla_attention.MIXERS,
    keys={
        **fla.KEYS,
        "num_heads": None,
        "expand_ratio": 128,
        "use_short_conv": False,
        "conv_size": 4,
        "use_lower_bound": True,
    },
    fixed={**fla.FIXED, "elementwise_affine": (True,)},
    harmless=fla.HARMLESS,
    to_ours=to_ours,
    to_theirs=to_theirs,
    tensors=(*fla.TENSORS, Shared("model.lower_bounds", "layers.{layer}.mixer.lower_bounds.weight")),
    layer_tensors=fla.layer_tensors(
        {
            **{f"{name}_proj.weight": f"in_proj.{name}.weight" for name in "qfi"},
            "g_norm.weight": "g_norm.weight",
            "o_proj.weight": "o_proj.weight",
            **fla.short_convolutions(("q", "q"), ("f", "k"), ("i", "v")),
        }
    ),
)
