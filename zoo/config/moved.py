"""Where classes are that earlier versions had elsewhere: their configs and checkpoints name them by the old path."""

from collections.abc import Mapping
from typing import Any

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


def at_new_paths(config: Any) -> Any:
    """A config of plain containers, or a part of one, whose `class_path`s name classes where they are now."""
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
