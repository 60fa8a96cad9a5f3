"""Configs: found by name, parsed against the signatures of constructors, and built; mistakes are explained."""

from zoo.config.build import build, captures_steps, from_config, instantiate, vocabulary
from zoo.config.find import CONFIGS, find_config
from zoo.config.keys import GROUPS, KEYS
from zoo.config.parser import add_run_keys, check_model_keys, parse, parse_model, read, read_model
from zoo.config.serialise import to_dict

__all__ = [
    "CONFIGS",
    "GROUPS",
    "KEYS",
    "add_run_keys",
    "build",
    "captures_steps",
    "check_model_keys",
    "find_config",
    "from_config",
    "instantiate",
    "parse",
    "parse_model",
    "read",
    "read_model",
    "to_dict",
    "vocabulary",
]
