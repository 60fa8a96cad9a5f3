"""Rotary positions in Hugging Face's configs: `rope_parameters`, or the older keys next to it."""

from collections.abc import Mapping
from typing import Any

from mixers import FeatureMap, Rotary
from zoo.conversion.family import Config, refusal

# where none of them says a base, not even null, transformers turns by 10,000
KEYS: Mapping[str, Any] = {"rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": None}
# images have positions along three axes, between which the channels are divided; those of text agree in all three
_TEXT_ALONE = {"mrope_section", "mrope_interleaved"}


def map_of(config: Config) -> dict[str, Any] | None:
    """The `map` of our Features, or None where nothing turns, as a base of null says.

    Raises:
        UserError: Positions are scaled.
    """
    older = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    settings = {**older, **(config["rope_scaling"] or {}), **(config["rope_parameters"] or {})}
    kind = {settings.pop(key, "default") for key in ("rope_type", "type")} - {"default", "mrope"}
    base, fraction = settings.pop("rope_theta"), settings.pop("partial_rotary_factor", 1.0)
    if kind or settings.keys() - _TEXT_ALONE:
        key = "rope_parameters" if config["rope_parameters"] else "rope_scaling"
        raise refusal(key, config[key], 'null or the rope_type "default"')
    if base is None:
        return None
    return {"class_path": "Rotary", "init_args": {"base": float(base), "fraction": float(fraction)}}


def keys_of(rotary: FeatureMap | None, partial: bool = False) -> dict[str, Any]:
    """Their keys for the map of our Features; with `partial` also what says how much of a head turns."""
    base = rotary.base if isinstance(rotary, Rotary) else None
    keys: dict[str, Any] = {"rope_theta": base}
    if partial and isinstance(rotary, Rotary):
        keys["partial_rotary_factor"] = rotary.turning / rotary.size
    return {**keys, "rope_parameters": {**keys, "rope_type": "default"}}
