"""Configs: found by name, parsed against the signatures of constructors, and built; mistakes are explained."""

from zoo.config.build import build, captures_steps, from_config, instantiate, vocabulary
from zoo.config.find import CONFIGS, find_config
from zoo.config.keys import GROUPS, KEYS
from zoo.config.parser import (
    ConfigFile,
    Parser,
    add_arguments,
    explained,
    parse,
    parse_model,
    read,
    read_model,
    run_parser,
)
from zoo.config.serialise import differences, to_dict, verified

__all__ = [
    "CONFIGS",
    "GROUPS",
    "KEYS",
    "ConfigFile",
    "Parser",
    "add_arguments",
    "build",
    "captures_steps",
    "differences",
    "explained",
    "find_config",
    "from_config",
    "instantiate",
    "parse",
    "parse_model",
    "read",
    "read_model",
    "run_parser",
    "to_dict",
    "verified",
    "vocabulary",
]
