"""The delta rules of flash-linear-attention: Gated DeltaNet, DeltaNet, KDA, Comba and Gated DeltaProduct."""

from typing import Any

from mixers import BoundedChannelDecay
from zoo.saved.public.families.fla_layout import (
    OUTPUT_NORM,
    Mixer,
    convolutions,
    family,
    projections,
    taps_of,
)
from zoo.saved.public.family import Config, Spec, component, refusal


def _output_norm(config: Config, gate: str = "use_gate", gated: str = "mixers.GatedRMSNorm") -> Spec:
    """Our norm of a head's output, with a gate if the key `gate` says so."""
    return component(gated if config[gate] else "mixers.NormOnly", eps=config["norm_eps"])


def _head_sizes(config: Config) -> dict[str, Any]:
    """Our arguments for heads, and for the features of queries, keys and values."""
    features, key_heads = {"conv": taps_of(config), "activation": "silu"}, config["num_heads"]
    value_heads = config.get("num_v_heads")
    return dict(
        num_heads=key_heads if value_heads is None else value_heads,
        num_key_heads=key_heads,
        head_dim=config["head_dim"],
        value_dim=int(config["head_dim"] * config["expand_v"]),
        qk={**features, "norm": "l2"},
        v=features,
    )


def _gated_deltanet(config: Config) -> Spec:
    options = dict(output=_output_norm(config), allow_neg_eigval=config["allow_neg_eigval"])
    return component("GatedDeltaNet", **_head_sizes(config), **options)


def _kda(config: Config) -> Spec:
    bound, decay = config["lower_bound"], component("mixers.ChannelDecay")
    if bound is not None or config["safe_gate"]:
        if type(bound) not in (int, float) or not bound < 0:
            raise refusal("lower_bound", bound, "numbers below 0, and null if safe_gate is false")
        decay = component("mixers.BoundedChannelDecay", lower_bound=bound)
    output = component("mixers.SigmoidGatedRMSNorm", eps=config["norm_eps"])
    options = dict(decay=decay, output=output, allow_neg_eigval=config["allow_neg_eigval"])
    return component("KDA", **_head_sizes(config), **options)


def _kda_keys(mixer: Any) -> dict[str, Any]:
    bound = mixer.decay.lower_bound if isinstance(mixer.decay, BoundedChannelDecay) else None
    return dict(lower_bound=bound, safe_gate=bound is not None)


def _comba(config: Config) -> Spec:
    sizes = _head_sizes(config)
    sizes["qk"] = sizes["v"]  # q is corrected before its norm
    output = _output_norm(config, "use_output_gate", "mixers.SigmoidGatedRMSNorm")
    return component("Comba", **sizes, output=output, correction=config["correction_factor"], unit_feedback=True)


def _gated_deltaproduct(config: Config) -> Spec:
    return component(
        "GatedDeltaProduct",
        **_head_sizes(config),
        num_steps=config["num_householder"],
        decay="mixers.Discretisation" if config["use_forget_gate"] else None,
        output=_output_norm(config, "use_output_gate"),
        allow_neg_eigval=config["allow_neg_eigval"],
    )


# theirs → ours
_ACTIVATIONS = {"silu": "silu", "relu": "relu", "elu": "elu1", "identity": "identity"}


def _deltanet(config: Config) -> Spec:
    """Our DeltaNet; with an output gate, or keys and values of two sizes, our Gated DeltaNet without decay."""
    heads, activation, taps = config["num_heads"], config["qk_activation"], taps_of(config)
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


def _deltanet_keys(mixer: Any) -> dict[str, Any]:
    ours = mixer.q_features.spec.activation
    return {"qk_activation": next(theirs for theirs, each in _ACTIVATIONS.items() if each == ours)}


_SHARED = {**convolutions(q="q", k="k", v="v"), "A_log": "decay.A_log", "dt_bias": "decay.dt_bias", **OUTPUT_NORM}
_LOW_RANKS = {
    **{f"{x}_proj.0.weight": f"in_proj.{x}.weight" for x in "fg"},
    "f_proj.1.weight": "decay_up.weight",
    "g_proj.1.weight": "g_up.weight",
    "g_proj.1.bias": "g_up.bias",
}
_MIXERS = (
    Mixer(
        "gated_deltanet",
        "GatedDeltaNet",
        mixers="GatedDeltaNet",
        keys=dict(num_hidden_layers=21, num_heads=6, num_v_heads=None, head_dim=256, expand_v=2.0, use_gate=True)
        | dict(use_short_conv=True, conv_size=4, allow_neg_eigval=False),
        fixed=dict(output_gate_activation=("swish", "silu")),
        to_ours=_gated_deltanet,
        tensors={**projections("qkvgab"), **_SHARED},
    ),
    Mixer(
        "deltanet",
        "DeltaNet",
        model_type="delta_net",
        mixers="DeltaNet GatedDeltaNet",
        keys=dict(num_heads=16, expand_k=1.0, expand_v=1.0, use_gate=False, allow_neg_eigval=False)
        | dict(use_short_conv=True, conv_size=4, qk_activation="silu"),
        fixed=dict(use_beta=(True,), qk_norm=("l2",), use_output_norm=(True,)),
        to_ours=_deltanet,
        to_theirs=_deltanet_keys,
        tensors={**projections("qkvgb"), **_SHARED},
    ),
    Mixer(
        "kda",
        "KDA",
        mixers="KDA",
        keys=dict(num_heads=16, num_v_heads=None, head_dim=128, expand_v=1.0, allow_neg_eigval=False)
        | dict(use_short_conv=True, conv_size=4, safe_gate=False, lower_bound=None),
        to_ours=_kda,
        to_theirs=_kda_keys,
        tensors={**projections("qkvb"), **_LOW_RANKS, **_SHARED},
    ),
    Mixer(
        "comba",
        "Comba",
        mixers="Comba",
        keys=dict(num_hidden_layers=21, num_heads=6, num_v_heads=None, head_dim=256, expand_v=2.0)
        | dict(use_short_conv=True, conv_size=4, use_output_gate=True, correction_factor=1.0),
        harmless="use_output_correction use_inner_decay",  # which the model does not hand to its layers
        to_ours=_comba,
        to_theirs=lambda mixer: {"correction_factor": mixer.correction},
        tensors={**projections("qkvgab"), "decay": "feedback", "D": "D", **_SHARED},
    ),
    Mixer(
        "gated_deltaproduct",
        "GatedDeltaProduct",
        mixers="GatedDeltaProduct",
        # the defaults of the config are not those of the layer
        keys=dict(num_hidden_layers=21, num_heads=6, head_dim=256, expand_v=2.0, use_output_gate=True)
        | dict(use_short_conv=True, conv_size=4, use_forget_gate=False, allow_neg_eigval=False, num_householder=1),
        to_ours=_gated_deltaproduct,
        to_theirs=lambda mixer: dict(use_forget_gate=mixer.decay is not None, num_householder=mixer.steps),
        tensors={**projections("qkvgab"), **_SHARED},
    ),
)

FAMILIES = tuple(family(mixer) for mixer in _MIXERS)
