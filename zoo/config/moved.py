"""Keys and classes that earlier versions called otherwise: configs and checkpoints from then are still read."""

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

RENAMED = {"sequence_parallel": "context_parallel"}  # old key → new one
# old module → new one
MOVED = {
    "zoo.activations": "zoo.train.callbacks.activation_checkpointing",
    "zoo.bench.fits": "zoo.benchmarks.fits",
    "zoo.compilation": "zoo.train.callbacks.compiled_blocks",
    "zoo.data.markov": "zoo.data.synthetic.markov",
    "zoo.data.mixture": "zoo.data.text.mixed_text",
    "zoo.data.module": "zoo.data.text.text_data",
    "zoo.data.mqar": "zoo.data.synthetic.mqar",
    "zoo.data.recall": "zoo.data.synthetic.recall",
    "zoo.mlp": "zoo.lm.mlp",
    "zoo.model": "zoo.lm.model",
    "zoo.stack": "zoo.lm.stack",
    "zoo.strategy": "zoo.train.zero",
}


def up_to_date(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with the keys and class paths of today; a line is logged for each key that has another name now."""
    return {key_of_today(key): at_new_paths(value) for key, value in config.items()}


def key_of_today(key: str) -> str:
    """A top-level key by the name that it has now."""
    if key in RENAMED:
        log.warning("%s is deprecated: it is called %s now", key, RENAMED[key])
    return RENAMED.get(key, key)


def at_new_paths(config: Any) -> Any:
    """A part of a config in plain containers, whose `class_path`s name classes where they are now."""
    if isinstance(config, Mapping):
        return {
            key: moved(value) if key == "class_path" and isinstance(value, str) else at_new_paths(value)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return [at_new_paths(part) for part in config]
    return config


def moved(path: str) -> str:
    """The dotted path of a class, where it is now."""
    module, _, name = path.rpartition(".")
    return f"{MOVED[module]}.{name}" if module in MOVED else path
