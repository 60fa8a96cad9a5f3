"""Renamed keys and moved classes: configs and checkpoints of earlier versions stay readable."""

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

RENAMED = {"sequence_parallel": "context_parallel"}  # old key → new key
# old keys of `model` → keys of `model.multipliers`
MULTIPLIERS = dict(embedding_multiplier="embedding", residual_multiplier="residual", logits_scaling="logits_scaling")
# old module → new module
MOVED = {
    "zoo.activations": "zoo.train.callbacks.activation_checkpointing",
    "zoo.bench.fits": "zoo.performance.multi_device",
    "zoo.benchmarks.fits": "zoo.performance.multi_device",
    "zoo.checkpoints.io": "zoo.checkpoints.format",
    "zoo.compilation": "zoo.train.callbacks.compiled_blocks",
    "zoo.data.markov": "zoo.data",
    "zoo.data.mixture": "zoo.data",
    "zoo.data.module": "zoo.data",
    "zoo.data.mqar": "zoo.data",
    "zoo.data.recall": "zoo.data",
    "zoo.mlp": "zoo.lm",
    "zoo.model": "zoo.lm",
    "zoo.stack": "zoo.lm",
    "zoo.strategy": "zoo.train.zero",
}
# classes that left a module that stays, and one whose path the parser does not shorten
MOVED_CLASSES = dict.fromkeys(("mixers.expansion.Expanded", "mixers.expanded.Expanded"), "mixers.Expanded")


def up_to_date(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with current keys and class paths; each renamed top-level key is logged."""
    current = {current_key(key): with_current_paths(value) for key, value in config.items()}
    model = current.get("model")
    if isinstance(model, dict) and (old := [key for key in model if key in MULTIPLIERS]):
        model["multipliers"] = {MULTIPLIERS[key]: model.pop(key) for key in old}
    return current


def current_key(key: str) -> str:
    """The current name of a top-level key."""
    if key in RENAMED:
        log.warning("%s is deprecated: it is now called %s", key, RENAMED[key])
    return RENAMED.get(key, key)


def with_current_paths(config: Any) -> Any:
    """A part of a config, in plain containers, with current `class_path`s."""
    if isinstance(config, Mapping):
        return {
            key: moved(value) if key == "class_path" and isinstance(value, str) else with_current_paths(value)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return [with_current_paths(part) for part in config]
    return config


def moved(path: str) -> str:
    """The current dotted path of a class."""
    path = MOVED_CLASSES.get(path, path)
    module, _, name = path.rpartition(".")
    return f"{MOVED[module]}.{name}" if module in MOVED else path
