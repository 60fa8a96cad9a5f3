"""The families of flash-linear-attention: GLA, HGRN2, RetNet, and those of the delta rule."""

from zoo.saved.public.families import fla_delta
from zoo.saved.public.families.fla_layout import (
    MIXER,
    OUR_MIXER,
    Mixer,
    convolutions,
    family,
    projections,
    taps_of,
)
from zoo.saved.public.family import Config, Spec, component, refusal
from zoo.saved.public.tensors import Rows, Shared

# the same where both have different names; the alias is the first one's name without `fuse_norm`
_NORM_OF_GATED = (
    Rows(f"{MIXER}g_norm_swish_gate.weight", (f"{OUR_MIXER}o_norm.weight",), aliases=(f"{MIXER}g_norm.weight",)),
    Rows(f"{MIXER}g_norm.weight", (f"{OUR_MIXER}o_norm.norm.weight",)),
)


def _check_one_to_one(config: Config) -> None:
    """Refuse keys and values that heads share."""
    if config["num_kv_heads"] not in (None, config["num_heads"]):
        raise refusal("num_kv_heads", config["num_kv_heads"], f"null or num_heads, {config['num_heads']}")


def _gla(config: Config) -> Spec:
    _check_one_to_one(config)
    features = {"conv": taps_of(config), "activation": "silu"} if config["use_short_conv"] else {"conv": 0}
    return component(
        "GLA",
        num_heads=config["num_heads"],
        expand_k=config["expand_k"],
        expand_v=config["expand_v"],
        qk=features,
        v=features,
        output_gate=config["use_output_gate"],
        norm_eps=config["norm_eps"],
    )


def _hgrn2(config: Config) -> Spec:
    size, heads, taps = config["expand_ratio"], config["num_heads"], taps_of(config)
    if size is None and heads is not None:
        size = config["hidden_size"] // heads
    if not size or config["hidden_size"] % size:
        raise refusal("expand_ratio", size, f"a divisor of hidden_size {config['hidden_size']}")
    return component(
        "HGRN2",
        head_dim=size,
        q={"conv": taps, "activation": "silu"},
        k={"conv": taps},
        v={"conv": taps},
        lower_bounds="LowerBounds" if config["use_lower_bound"] else None,
        norm_eps=1e-5,  # of the norm before the output projection, whatever norm_eps says
    )


def _retnet(config: Config) -> Spec:
    _check_one_to_one(config)
    heads = config["num_heads"]
    keys, values = (round(config["hidden_size"] * config[name]) for name in ("expand_k", "expand_v"))
    for name, width in (("expand_k", keys), ("expand_v", values)):
        if not width or width % heads:
            raise refusal(name, config[name], f"widths that num_heads {heads} divides")
    return component(
        "RetNet",
        num_heads=heads,
        head_dim=keys // heads,
        expand_v=values / keys,
        qk={"map": component("Rotary", base=10000.0)},
        output_gate=config["use_output_gate"],
        norm_eps=config["norm_eps"],
    )


_MIXERS = (
    Mixer(
        "gla",
        "GLA",
        mixers="GLA",
        keys=dict(num_heads=4, num_kv_heads=None, use_output_gate=True, expand_k=0.5, expand_v=1.0)
        | dict(use_short_conv=False, conv_size=4),
        fixed=dict(feature_map=(None,), clamp_min=(None,), elementwise_affine=(True,), use_gk=(True,), use_gv=(False,)),
        to_ours=_gla,
        norms=_NORM_OF_GATED,
        tensors={
            **projections("qkvg"),
            "gk_proj.0.weight": "in_proj.decay.weight",
            "gk_proj.1.weight": "decay_up.weight",
            "gk_proj.1.bias": "decay_up.bias",
            **convolutions(q="q", k="k", v="v"),
        },
    ),
    Mixer(
        "hgrn2",
        "HGRN2",
        mixers="HGRN2",
        keys=dict(num_heads=None, expand_ratio=128, use_short_conv=False, conv_size=4, use_lower_bound=True),
        fixed=dict(elementwise_affine=(True,)),
        to_ours=_hgrn2,
        to_theirs=lambda mixer: {"use_lower_bound": mixer.lower_bounds is not None},
        layer=-1,
        shared=(Shared("model.lower_bounds", "layers.{layer}.mixer.lower_bounds.weight"),),
        tensors={**projections("qfi"), "g_norm.weight": "g_norm.weight", **convolutions(q="q", f="k", i="v")},
    ),
    Mixer(
        "retnet",
        "RetNet",
        mixers="RetNet",
        keys=dict(num_heads=8, num_kv_heads=None, use_output_gate=True, expand_k=1.0, expand_v=2.0, hidden_ratio=2.0),
        fixed=dict(feature_map=(None,), elementwise_affine=(True,)),
        harmless="use_short_conv conv_size",  # which the model does not hand to its layers
        to_ours=_retnet,
        norms=_NORM_OF_GATED,
        tensors=projections("qkvg"),
    ),
)

_OTHERS = (family(mixer) for mixer in _MIXERS)
FAMILIES = (*_OTHERS, *fla_delta.FAMILIES)
