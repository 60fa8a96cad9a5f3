"""Rotary positions in the terms of transformers: `rope_parameters`, and the older `rope_theta` and `rope_scaling`."""

import math
from collections.abc import Mapping
from typing import Any

from kernels import UserError
from mixers import FeatureMap, LinearRotary, Llama3Rotary, Rotary, YarnRotary
from zoo.saved.public.family import Config, Spec, check_kind, component, refusal, unknown_in

# where none of them says a base, not even null, transformers turns by 10,000
ROTARY_KEYS: Config = {
    **{"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None},
    "max_position_embeddings": 2048,
}
# images have positions along three axes, between which the channels are divided; those of text agree in all three
_TEXT_ALONE = {"mrope_section", "mrope_interleaved"}
_LENGTH = "original_max_position_embeddings"
# rope_type → our class, and its arguments for their keys
_SCALED: Mapping[str, tuple[type[LinearRotary], Mapping[str, str]]] = {
    "linear": (LinearRotary, {"factor": "factor"}),
    "llama3": (
        Llama3Rotary,
        {"factor": "factor", _LENGTH: "original_length"}
        | {"low_freq_factor": "slow_turns", "high_freq_factor": "fast_turns"},
    ),
    "yarn": (
        YarnRotary,
        {"factor": "factor", _LENGTH: "original_length", "beta_slow": "slow_turns", "beta_fast": "fast_turns"}
        | {"attention_factor": "amplitude", "truncate": "whole"},
    ),
}
# keys of `yarn` that `attention_factor` follows from
_YARN_SCALES = ("mscale", "mscale_all_dim")
# values of the kind that each must have
_KINDS: Config = {"factor": 1.0, _LENGTH: 1, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "beta_slow": 1.0} | {
    **{"beta_fast": 1.0, "attention_factor": 1.0, "truncate": True},
    **dict.fromkeys(_YARN_SCALES, 1.0),
}


def rotary_map(config: Config, partial: bool = True) -> Spec | None:
    """The `map` of our Features, from `rope_parameters` or the older keys; None where a base of null turns nothing.

    Without `partial`, a config whose heads turn only in part is refused.
    """
    key = "rope_parameters" if config["rope_parameters"] else "rope_scaling"
    older = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    settings = {**older, **(config["rope_scaling"] or {}), **(config["rope_parameters"] or {})}
    kinds = {settings.pop(name, "default") for name in ("rope_type", "type")} - {"default", "mrope"}
    base, fraction = settings.pop("rope_theta"), settings.pop("partial_rotary_factor", None)
    check_kind(f"{key}.rope_theta", base, 1.0)
    check_kind(f"{key}.partial_rotary_factor", fraction, 1.0)
    fraction = 1.0 if fraction is None else fraction
    others = unknown_in(settings, _KINDS.keys() | _TEXT_ALONE)
    settings = {n: v for n, v in settings.items() if n in others or (v is not None and n in _KINDS)}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kinds or (kind is None and settings) or (kind is not None and (base is None or kind not in _SCALED)):
        raise refusal(key, config[key], f"null, or the rope_type default, {', '.join(_SCALED)}")
    if fraction != 1 and not partial:
        raise UserError(
            f"config.json: partial_rotary_factor is {fraction!r:.80}, which transformers ignores in this architecture, "
            "whose heads turn as a whole; leave it out or set it to 1."
        )
    if base is None:
        return None
    turning = {"base": float(base), "fraction": float(fraction)}
    if kind is None:
        return component("Rotary", **turning)
    ours, names = _SCALED[kind]
    settings.setdefault(_LENGTH, config["max_position_embeddings"])
    if kind == "linear":
        del settings[_LENGTH]
    if kind == "yarn":
        _complete_yarn(settings, config)
    for name, value in settings.items():
        if name not in names:
            raise refusal(key, config[key], f"{kind} with {', '.join(names)}")
        check_kind(f"{key}.{name}", value, _KINDS[name])
    if missing := [
        name for name in ("factor", "low_freq_factor", "high_freq_factor") if name in names.keys() - settings
    ]:
        raise UserError(f"config.json: {key} lacks {missing[0]}, which {kind} needs.")
    return component(ours.__name__, **{names[name]: value for name, value in settings.items()}, **turning)


def _complete_yarn(settings: dict[str, Any], config: Config) -> None:
    """Fill in what follows from other keys, in place."""
    for name in _YARN_SCALES:
        check_kind(f"rope_parameters.{name}", settings.get(name), _KINDS[name])
    settings.setdefault("factor", config["max_position_embeddings"] / settings[_LENGTH])
    scale, scale_of_all = (settings.pop(name, None) for name in _YARN_SCALES)
    if scale and scale_of_all and "attention_factor" not in settings:
        logarithm = 0.1 * math.log(max(settings["factor"], 1.0))
        settings["attention_factor"] = (1 + scale * logarithm) / (1 + scale_of_all * logarithm)


def rotary_keys(rotary: FeatureMap | None, partial: bool = False) -> dict[str, Any]:
    """Their keys for the map of our Features; with `partial` also what says how much of a head turns."""
    if not isinstance(rotary, Rotary):
        return {"rope_theta": None, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    part = {"partial_rotary_factor": rotary.turning / rotary.size} if partial else {}
    keys: dict[str, Any] = {"rope_theta": rotary.base, **part}
    kind = next((kind for kind, (ours, _) in _SCALED.items() if type(rotary) is ours), None)
    if kind is None:
        return {**keys, "rope_parameters": {**keys, "rope_type": "default"}}
    scaling = {"rope_type": kind, **part, **{name: getattr(rotary, ours) for name, ours in _SCALED[kind][1].items()}}
    length = getattr(rotary, "original_length", None)
    lengths = {} if length is None else {"max_position_embeddings": int(length * rotary.factor)}
    return {**keys, **lengths, "rope_parameters": {**keys, **scaling}, "rope_scaling": scaling}
