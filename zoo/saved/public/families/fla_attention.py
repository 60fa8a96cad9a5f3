"""Hybrids of flash-linear-attention: the key `attn`, which says in which layers attention takes the mixer's place."""

import string
from collections.abc import Mapping
from typing import Any

from kernels import UserError
from mixers import Rotary, SoftmaxAttention, TokenMixer
from zoo.lm.model import LanguageModel
from zoo.saved.public.family import Config, Spec, check_kind, component, refusal, unknown_in

MIXERS = frozenset({"SoftmaxAttention", "SlidingWindowAttention"})
_LINEAR, _FULL = "L", "".join(letter for letter in string.ascii_letters if letter != "L")  # letters of the pattern
_REQUIRED = {"layers", "num_heads"}
_OPTIONAL: Config = {"num_kv_heads": None, "qkv_bias": False, "window_size": None, "rope_theta": 10000.0}
# values of the kind that each must have
_KINDS: Config = {**_OPTIONAL, "num_heads": 1, "num_kv_heads": 1, "window_size": 1}


def stack_of(config: Config, mixer: Spec) -> Spec:
    """Our stack of a mixer, and of attention where `attn` says so. A UserError if no layer is left to the mixer."""
    attention, count = config["attn"], config["num_hidden_layers"]
    if attention is None:
        return component("Uniform", mixer=mixer)
    specs = attention if isinstance(attention, list) else [attention]
    if len(specs) > len(_FULL):
        raise refusal("attn", f"{len(specs)} settings", f"{len(_FULL)} at most")
    pattern, mixers = [_LINEAR] * count, {_LINEAR: mixer}
    for letter, spec in zip(_FULL, specs, strict=False):
        _check(spec, count)
        for layer in spec["layers"]:
            if pattern[layer] != _LINEAR:
                raise refusal("attn.layers", spec["layers"], "each layer once")
            pattern[layer] = letter
        mixers[letter] = _attention({**_OPTIONAL, **{key: v for key, v in spec.items() if v is not None}})
    if _LINEAR not in pattern:
        raise refusal("attn.layers", list(range(count)), "hybrids, so some layers that are not of attention")
    used = {letter: mixers[letter] for letter in sorted(set(pattern))}
    return component("Pattern", pattern="".join(pattern), mixers=used)


def _check(spec: Any, count: int) -> None:
    allowed = _OPTIONAL.keys() | _REQUIRED
    if not isinstance(spec, Mapping) or not spec.keys() >= _REQUIRED or unknown_in(spec, allowed):
        optional = ", ".join(_OPTIONAL)
        raise refusal("attn", spec, f"settings of attention with layers and num_heads, and no others than {optional}")
    for key, kind in _KINDS.items():
        check_kind(f"attn.{key}", spec.get(key), kind)
    layers = spec["layers"]
    if not isinstance(layers, list) or not all(type(layer) is int and 0 <= layer < count for layer in layers):
        raise refusal("attn.layers", layers, f"a list of layers from 0 to {count - 1}")


def _attention(spec: Config) -> Spec:
    """The config of our attention for theirs."""
    window = {} if spec["window_size"] is None else {"window_size": spec["window_size"]}
    return component(
        "SlidingWindowAttention" if window else "SoftmaxAttention",
        num_heads=spec["num_heads"],
        num_kv_heads=spec["num_kv_heads"],
        qk={"map": component("Rotary", base=float(spec["rope_theta"]))},
        bias=spec["qkv_bias"],
        **window,
    )


def keys_of(model: LanguageModel) -> dict[str, Any] | list[dict[str, Any]] | None:
    """Their `attn`: one entry, or several where layers differ; None without attention."""
    entries: list[dict[str, Any]] = []
    for layer, mixer in enumerate(model.mixers):
        if not isinstance(mixer, SoftmaxAttention):
            continue
        turning = mixer.q_features.map
        settings = {
            "num_heads": mixer.num_heads,
            "num_kv_heads": mixer.num_kv_heads,
            "qkv_bias": mixer.in_proj.bias is not None,
            "window_size": mixer.window_size,
            "rope_theta": turning.base if isinstance(turning, Rotary) else _OPTIONAL["rope_theta"],
        }
        alike = next((spec for spec in entries if spec.items() >= settings.items()), None)
        if alike is None:
            entries.append(alike := {"layers": [], **settings})
        alike["layers"].append(layer)
    return entries[0] if len(entries) == 1 else entries or None


def linear_mixers(model: LanguageModel) -> list[TokenMixer]:
    """The mixers of the layers that are not of attention; a UserError if all are."""
    if not (mixers := [mixer for mixer in model.mixers if not isinstance(mixer, SoftmaxAttention)]):
        raise UserError("to: fla is for models with linear layers, and all of this one are attention.")
    return mixers
