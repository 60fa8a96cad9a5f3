"""GLA, Gated DeltaNet, DeltaNet, HGRN2 and RetNet of flash-linear-attention, also in hybrids with attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mixers import Features
from zoo.lm.model import LanguageModel
from zoo.saved.public.families import fla_attention
from zoo.saved.public.families.llama import MLP
from zoo.saved.public.family import TIED, Config, Family, Spec, component, keys_of, mlp_size, model_of, refusal, words
from zoo.saved.public.tensors import Rows, Rule, Shared, around_layers, rows

HARMLESS = words("attn_mode fuse_norm fuse_swiglu fuse_cross_entropy fuse_linear_cross_entropy use_l2warp")
_SIZES = dict(vocab_size=32000, hidden_size=2048, num_hidden_layers=24, hidden_ratio=4.0, intermediate_size=None)
_KEYS: Config = {**_SIZES, "norm_eps": 1e-6, TIED: False, "attn": None}
_TENSORS = around_layers("model.embeddings.weight", "model.norm.weight")
_AROUND_THE_MIXER = {
    "attn_norm.weight": "mixer_norm.weight",
    "mlp_norm.weight": "mlp_norm.weight",
    **MLP,
}
_MIXER = "model.layers.{layer}.attn."
_OUR_MIXER = "layers.{layer}.mixer."
# with a gate or without
_OUTPUT_NORM: Mapping[str, tuple[str, ...]] = {"o_norm.weight": ("o_norm.weight", "o_norm.norm.weight")}
# the same where both have different names; the alias is the first one's name without `fuse_norm`
_NORM_OF_GATED = (
    rows(f"{_MIXER}g_norm_swish_gate.weight", f"{_OUR_MIXER}o_norm.weight", aliases=[f"{_MIXER}g_norm.weight"]),
    rows(f"{_MIXER}g_norm.weight", f"{_OUR_MIXER}o_norm.norm.weight"),
)


@dataclass(frozen=True)
class _Mixer:
    """A mixer of theirs.

    Attributes:
        name: The family's name without `fla_`.
        architecture: The name of the model's class without `ForCausalLM`.
        mixers: Names of our mixers, separated by spaces.
        keys: Keys of its config → defaults.
        to_ours: Their keys → our mixer.
        to_theirs: Our mixer, and the width of the model → their keys.
        tensors: Names in their mixer → in ours.
        model_type: None for `name`.
        fixed, harmless: As for `Family`.
        norms, shared: Rules for further tensors of each layer, and of the model.
        layer: Which of the layers without attention `to_theirs` reads.
    """

    name: str
    architecture: str
    mixers: str
    keys: Config
    to_ours: Callable[[Config], Spec]
    to_theirs: Callable[[Any, int], dict[str, Any]]
    tensors: Mapping[str, str | tuple[str, ...]]
    model_type: str | None = None
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    harmless: str = ""
    norms: tuple[Rows, ...] = ()
    shared: tuple[Rule, ...] = ()
    layer: int = 0


def _family(theirs: _Mixer) -> Family:
    """The models with a mixer in all layers but those of attention."""

    def to_ours(config: Config) -> dict[str, Any]:
        stack = fla_attention.stack_of(config, theirs.to_ours(config))
        return model_of(config, config["norm_eps"], stack, intermediate_size=_intermediate_size(config))

    def to_theirs(model: LanguageModel) -> dict[str, Any]:
        mixer = fla_attention.linear_mixers(model)[theirs.layer]
        around = {**keys_of(model, "norm_eps"), "intermediate_size": mlp_size(model)}
        return {**around, "attn": fla_attention.keys_of(model), **theirs.to_theirs(mixer, model.hidden_size)}

    table = [rows(f"model.layers.{{layer}}.{t}", f"layers.{{layer}}.{o}") for t, o in _AROUND_THE_MIXER.items()]
    for name, ours in {**fla_attention.TENSORS, **theirs.tensors}.items():
        parts = (ours,) if isinstance(ours, str) else ours
        table.append(rows(_MIXER + name, *(_OUR_MIXER + part for part in parts)))
    return Family(
        name=f"fla_{theirs.name}",
        target="fla",
        model_types=(theirs.model_type or theirs.name,),
        architecture=f"{theirs.architecture}ForCausalLM",
        mixers=words(theirs.mixers) | fla_attention.MIXERS,
        keys={**_KEYS, **theirs.keys},
        fixed={"hidden_act": ("swish",), "attnres_block_size": (None,), **theirs.fixed},
        harmless=HARMLESS | words(theirs.harmless),
        to_ours=to_ours,
        to_theirs=to_theirs,
        tensors=(*_TENSORS, *theirs.shared),
        layer_tensors=(*theirs.norms, *table),
    )


def _intermediate_size(config: Config) -> int:
    """The inner size of the MLPs: as given, or about 2/3 · hidden_ratio · hidden_size."""
    if config["intermediate_size"] is not None:
        return config["intermediate_size"]
    ratio = 4 if config["hidden_ratio"] is None else config["hidden_ratio"]
    return -(int(config["hidden_size"] * ratio * 2 / 3) // -256) * 256


def _projections(streams: str) -> dict[str, str]:
    """The weights of the projections of these streams, and of the output's."""
    return {**{f"{x}_proj.weight": f"in_proj.{x}.weight" for x in streams}, "o_proj.weight": "o_proj.weight"}


def _convolutions(**streams: str) -> dict[str, str]:
    """The weights and biases of convolutions, by stream: theirs=ours."""
    parts = ("weight", "bias")
    return {f"{t}_conv1d.{part}": f"{o}_features.{part}" for t, o in streams.items() for part in parts}


def _taps(config: Config) -> int:
    return config["conv_size"] if config["use_short_conv"] else 0


def _convolution_keys(features: Features) -> dict[str, Any]:
    return {"use_short_conv": features.conv > 0, "conv_size": features.conv or 4}


def _output_norm(config: Config) -> Spec:
    """Our norm of a head's output, with a gate if `use_gate` says so."""
    return component("mixers.GatedRMSNorm" if config["use_gate"] else "mixers.NormOnly", eps=config["norm_eps"])


def _widths(mixer: Any, hidden_size: int) -> dict[str, float]:
    """The widths of all keys and of all values, relative to that of the model."""
    sizes = {"expand_k": mixer.key_size, "expand_v": mixer.value_size}
    return {key: mixer.num_heads * size / hidden_size for key, size in sizes.items()}


def _check_one_to_one(config: Config) -> None:
    """Refuse keys and values that heads share."""
    if config["num_kv_heads"] not in (None, config["num_heads"]):
        raise refusal("num_kv_heads", config["num_kv_heads"], f"null or num_heads, {config['num_heads']}")


def _gla(config: Config) -> Spec:
    _check_one_to_one(config)
    features = {"conv": _taps(config), "activation": "silu"} if config["use_short_conv"] else {"conv": 0}
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


def _gla_keys(mixer: Any, hidden_size: int) -> dict[str, Any]:
    gate = {"num_heads": mixer.num_heads, "use_output_gate": mixer.o_norm.gated}
    return {**gate, **_widths(mixer, hidden_size), **_convolution_keys(mixer.q_features.spec)}


def _gated_deltanet(config: Config) -> Spec:
    features, key_heads = {"conv": _taps(config), "activation": "silu"}, config["num_heads"]
    return component(
        "GatedDeltaNet",
        num_heads=key_heads if config["num_v_heads"] is None else config["num_v_heads"],
        num_key_heads=key_heads,
        head_dim=config["head_dim"],
        value_dim=int(config["head_dim"] * config["expand_v"]),
        qk={**features, "norm": "l2"},
        v=features,
        output=_output_norm(config),
        allow_neg_eigval=config["allow_neg_eigval"],
    )


def _gated_deltanet_keys(mixer: Any, hidden_size: int) -> dict[str, Any]:
    heads = dict(num_heads=mixer.num_key_heads, num_v_heads=mixer.num_heads, head_dim=mixer.key_size)
    options = dict(use_gate=mixer.o_norm.gated, allow_neg_eigval=mixer.beta.most == 2)
    widths = dict(expand_v=mixer.value_size / mixer.key_size)
    return {**heads, **widths, **options, **_convolution_keys(mixer.q_features.spec)}


# theirs → ours
_ACTIVATIONS = {"silu": "silu", "relu": "relu", "elu": "elu1", "identity": "identity"}


def _deltanet(config: Config) -> Spec:
    """Our DeltaNet; with an output gate, or keys and values of two sizes, our Gated DeltaNet without decay."""
    heads, activation, taps = config["num_heads"], config["qk_activation"], _taps(config)
    if activation not in _ACTIVATIONS:
        raise refusal("qk_activation", activation, " or ".join(_ACTIVATIONS))
    key_size, value_size = (round(config["hidden_size"] * config[name]) // heads for name in ("expand_k", "expand_v"))
    arguments = {
        "num_heads": heads,
        "head_dim": key_size,
        "qk": {"conv": taps, "activation": _ACTIVATIONS[activation], "norm": "l2"},
        "v": {"conv": taps, "activation": "silu"},
        "allow_neg_eigval": config["allow_neg_eigval"],
    }
    if key_size == value_size and not config["use_gate"]:
        return component("DeltaNet", **arguments, norm_eps=config["norm_eps"])
    return component("GatedDeltaNet", **arguments, value_dim=value_size, decay=None, output=_output_norm(config))


def _deltanet_keys(mixer: Any, hidden_size: int) -> dict[str, Any]:
    spec = mixer.q_features.spec
    activation = next(theirs for theirs, ours in _ACTIVATIONS.items() if ours == spec.activation)
    options = dict(use_gate=getattr(mixer.o_norm, "gated", False), allow_neg_eigval=mixer.beta.most == 2)
    streams = dict(qk_activation=activation, **_convolution_keys(spec))
    return {"num_heads": mixer.num_heads, **_widths(mixer, hidden_size), **options, **streams}


def _hgrn2(config: Config) -> Spec:
    size, heads, taps = config["expand_ratio"], config["num_heads"], _taps(config)
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


def _hgrn2_keys(mixer: Any, hidden_size: int) -> dict[str, Any]:
    sizes = {"num_heads": mixer.num_heads, "expand_ratio": mixer.key_size}
    bounds = {"use_lower_bound": mixer.lower_bounds is not None}
    return {**sizes, **bounds, **_convolution_keys(mixer.q_features.spec)}


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


def _retnet_keys(mixer: Any, hidden_size: int) -> dict[str, Any]:
    gate = {"num_heads": mixer.num_heads, "use_output_gate": mixer.o_norm.gated}
    return {**gate, **_widths(mixer, hidden_size)}


_MIXERS = (
    _Mixer(
        "gla",
        "GLA",
        mixers="GLA",
        keys=dict(num_heads=4, num_kv_heads=None, use_output_gate=True, expand_k=0.5, expand_v=1.0)
        | dict(use_short_conv=False, conv_size=4),
        fixed=dict(feature_map=(None,), clamp_min=(None,), elementwise_affine=(True,), use_gk=(True,), use_gv=(False,)),
        to_ours=_gla,
        to_theirs=_gla_keys,
        norms=_NORM_OF_GATED,
        tensors={
            **_projections("qkvg"),
            "gk_proj.0.weight": "in_proj.decay.weight",
            "gk_proj.1.weight": "decay_up.weight",
            "gk_proj.1.bias": "decay_up.bias",
            **_convolutions(q="q", k="k", v="v"),
        },
    ),
    _Mixer(
        "gated_deltanet",
        "GatedDeltaNet",
        mixers="GatedDeltaNet",
        keys=dict(num_hidden_layers=21, num_heads=6, num_v_heads=None, head_dim=256, expand_v=2.0, use_gate=True)
        | dict(use_short_conv=True, conv_size=4, allow_neg_eigval=False),
        fixed=dict(output_gate_activation=("swish", "silu")),
        to_ours=_gated_deltanet,
        to_theirs=_gated_deltanet_keys,
        tensors={
            **_projections("qkvgab"),
            "A_log": "decay.A_log",
            "dt_bias": "decay.dt_bias",
            **_convolutions(q="q", k="k", v="v"),
            **_OUTPUT_NORM,
        },
    ),
    _Mixer(
        "deltanet",
        "DeltaNet",
        model_type="delta_net",
        mixers="DeltaNet GatedDeltaNet",
        keys=dict(num_heads=16, expand_k=1.0, expand_v=1.0, use_gate=False, allow_neg_eigval=False)
        | dict(use_short_conv=True, conv_size=4, qk_activation="silu"),
        fixed=dict(use_beta=(True,), qk_norm=("l2",), use_output_norm=(True,)),
        to_ours=_deltanet,
        to_theirs=_deltanet_keys,
        tensors={**_projections("qkvgb"), **_convolutions(q="q", k="k", v="v"), **_OUTPUT_NORM},
    ),
    _Mixer(
        "hgrn2",
        "HGRN2",
        mixers="HGRN2",
        keys=dict(num_heads=None, expand_ratio=128, use_short_conv=False, conv_size=4, use_lower_bound=True),
        fixed=dict(elementwise_affine=(True,)),
        to_ours=_hgrn2,
        to_theirs=_hgrn2_keys,
        layer=-1,
        shared=(Shared("model.lower_bounds", "layers.{layer}.mixer.lower_bounds.weight"),),
        tensors={**_projections("qfi"), "g_norm.weight": "g_norm.weight", **_convolutions(q="q", f="k", i="v")},
    ),
    _Mixer(
        "retnet",
        "RetNet",
        mixers="RetNet",
        keys=dict(num_heads=8, num_kv_heads=None, use_output_gate=True, expand_k=1.0, expand_v=2.0, hidden_ratio=2.0),
        fixed=dict(feature_map=(None,), elementwise_affine=(True,)),
        harmless="use_short_conv conv_size",  # which the model does not hand to its layers
        to_ours=_retnet,
        to_theirs=_retnet_keys,
        norms=_NORM_OF_GATED,
        tensors=_projections("qkvg"),
    ),
)

FAMILIES = tuple(_family(mixer) for mixer in _MIXERS)
