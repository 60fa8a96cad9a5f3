"""Configs: found by name, parsed against the signatures of constructors, and built; mistakes are explained."""

from zoo.config.build import build, from_config, instantiate, vocabulary
from zoo.config.find import CONFIGS, find_config
from zoo.config.parser import CLASSES, KEYS, ConfigFile, Parser, add_arguments, explained, parse, read, run_parser
from zoo.config.serialise import differences, to_dict, verified

__all__ = [
    "CLASSES",
    "CONFIGS",
    "KEYS",
    "ConfigFile",
    "Parser",
    "add_arguments",
    "build",
    "differences",
    "explained",
    "find_config",
    "from_config",
    "instantiate",
    "parse",
    "read",
    "run_parser",
    "to_dict",
    "verified",
    "vocabulary",
]
