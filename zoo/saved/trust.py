"""Vetting of foreign models: without `--trust`, only this project's classes and registered mixers are built.

The parser imports and calls whatever a config names, anywhere in it. So all strings in the `model` of a foreign config
are vetted first: they must be words that name no class, or name classes of the table in `own.py` or mixers that the
user or an installed plug-in registered. Importing a class does not make it allowed. The other sections of a foreign
config are not built.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

import torch

import mixers
from kernels import Option, UserError
from zoo.config.own import own_component, registered
from zoo.config.signatures import subclasses
from zoo.files.safe_yaml import check_plain
from zoo.lm.stack import Stack


def not_trusted(source: object, what: str) -> UserError:
    """The error to raise for a file of someone else that would be used for more than its model and tokenizer."""
    return UserError(
        f"{source} was not written by you, and {what}; if you trust who wrote it, add ", Option("trust", True)
    )


def vet_model(model: Any, source: object) -> None:
    """Check that building a foreign model imports and calls no foreign code.

    A UserError names the key and the class otherwise, and the file that the model's config comes from, `source`.
    """
    check_plain(model, f"{source}: its model")
    if not isinstance(model, Mapping):
        raise UserError(f"{source}: model is not a mapping of arguments.")
    _vet(model, "model", source)


def _vet(value: Any, key: str, source: object) -> None:
    if isinstance(value, Mapping):
        for name, part in value.items():
            if isinstance(name, str) and re.search(r"[.+]", name):  # split at dots, or taken as an addition
                raise UserError(f"{source}: {key} has the key {name!r}, which no run saves.")
            if name == "class_path" and not (isinstance(part, str) and _is_allowed(part)):
                raise _refusal(key, part, source)
            _vet(part, key if name in ("class_path", "init_args") else f"{key}.{name}", source)
    elif isinstance(value, list | tuple):
        for part in value:
            _vet(part, key, source)
    elif isinstance(value, str) and not (_is_plain(value) or _is_allowed(value)):
        raise _refusal(key, value, source)


def _is_plain(text: str) -> bool:
    """Return whether text is a word, or the letters of a pattern, and names no class that the parser could build."""
    named = any(cls.__name__ == text for base in (torch.nn.Module, Stack) for cls in subclasses(base))
    return re.fullmatch(r"[\w*-]*", text) is not None and not named


def _is_allowed(name: str) -> bool:
    """Return whether a class of this name is in the table of components or a registered mixer."""
    if own_component(name) is not None or name in mixers.names():
        return True
    module, _, last = name.rpartition(".")
    cls = vars(sys.modules[module]).get(last) if module in sys.modules else None
    return isinstance(cls, type) and registered(cls)


def _refusal(key: str, name: object, source: object) -> UserError:
    shown = " ".join(str(name).split())[:80]
    return not_trusted(source, f"its {key} names {shown!r}, which would be imported and called")
