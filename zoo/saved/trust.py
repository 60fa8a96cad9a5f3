"""Vetting of foreign models: without `--trust`, only this project's classes and registered mixers are built.

The parser imports and calls whatever a `class_path` names, anywhere in a config. So the `model` of a foreign config is
vetted first, along the signatures of the constructors. Where a component is expected it may name a matching class of
the table in `own.py`, or one that the user or an installed plug-in registered; elsewhere it may name no class at all.
Importing a class does not make it allowed. The other sections of a foreign config are not built.
"""

import collections.abc
import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from kernels import Option, UserError
from zoo.config.own import own_component, registered
from zoo.config.signatures import component, constructor, hints, subclasses
from zoo.files.safe_yaml import check_plain
from zoo.lm.model import LanguageModel

_NUMBERS = (NoneType, bool, int, float)
_MAPPINGS = (dict, collections.abc.Mapping)
_CONTAINERS = (*_MAPPINGS, list, tuple, collections.abc.Sequence)
_WORD = re.compile(r"\w*")


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
    _Vetting(source).arguments(model, LanguageModel, "model")


@dataclass(frozen=True)
class _Vetting:
    """Walks a config along the signatures of the constructors."""

    source: object

    def arguments(self, values: Any, cls: Any, key: str) -> None:
        """Vet the arguments of a constructor."""
        if not isinstance(values, Mapping):
            raise UserError(f"{self.source}: {key} is not a mapping of arguments.")
        self._check_keys(values, key)
        types = hints(cls)
        parameters = inspect.signature(constructor(cls)).parameters
        for name, value in values.items():
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            if value != default:
                self.value(value, types.get(name), f"{key}.{name}")

    def value(self, value: Any, hint: Any, key: str) -> None:
        """Vet a value of a parameter with the given type hint."""
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        bases = tuple(base for option in options if (base := component(option)) is not None)
        parts = next((option for option in options if get_origin(option) in _CONTAINERS), None)
        fields = next((option for option in options if dataclasses.is_dataclass(option)), None)
        chosen = any(get_origin(option) is Literal and value in get_args(option) for option in options)
        if value is None or isinstance(value, bool | int | float) or chosen:
            return
        if bases:
            self.component(value, bases, key)
        elif isinstance(value, str):
            self._text(value, options, key)
        elif isinstance(value, Mapping) and fields is not None and "class_path" not in value:
            self.arguments(value, fields, key)
        elif isinstance(value, Mapping):
            self._check_keys(value, key)
            if "class_path" in value:
                raise self._refusal(key, value["class_path"])
            inner = get_args(parts)[-1] if parts is not None and get_origin(parts) in _MAPPINGS else None
            for name, part in value.items():
                self.value(part, inner, f"{key}.{name}")
        else:
            inner = get_args(parts)[0] if parts is not None and get_origin(parts) not in _MAPPINGS else None
            for part in value:
                self.value(part, inner, key)

    def component(self, value: Any, bases: tuple[type, ...], key: str) -> None:
        """Vet the name of a class, or a mapping of a class and its arguments."""
        name, arguments = value, None
        if isinstance(value, Mapping):
            self._check_keys(value, key)
            if extra := sorted(set(value) - {"class_path", "init_args"}):
                raise UserError(f"{self.source}: {key} has {extra[0]} next to class_path and init_args.")
            name, arguments = value.get("class_path"), value.get("init_args")
        if not isinstance(name, str):
            raise UserError(f"{self.source}: {key} names no class.")
        cls = self._allowed_class(name, bases)
        if cls is None:
            raise self._refusal(key, name)
        self.arguments({} if arguments is None else arguments, cls, key)

    def _allowed_class(self, name: str, bases: tuple[type, ...]) -> type | None:
        """The class of that name, if it is in the table of components or registered; None if not."""
        if (own := own_component(name)) is not None:
            return own if issubclass(own, bases) else None
        module, _, last = name.rpartition(".")
        for base in bases:
            if module:
                imported = sys.modules.get(module)
                candidates = [None if imported is None else vars(imported).get(last)]
            else:
                candidates = [cls for cls in subclasses(base) | {base} if cls.__name__ == name]
            for cls in candidates:
                if isinstance(cls, type) and issubclass(cls, base) and registered(cls):
                    return cls
        return None

    def _text(self, value: str, options: tuple[Any, ...], key: str) -> None:
        """Vet a string where no class is expected."""
        if all(get_origin(option) is Literal or option in _NUMBERS for option in options):
            return  # the parser checks choices
        if str not in options and not _WORD.fullmatch(value):  # it might be parsed as YAML that names a class
            raise self._refusal(key, value)

    def _check_keys(self, values: Mapping[Any, Any], key: str) -> None:
        """Refuse keys that the parser would split at dots, or take as additions."""
        if odd := next((name for name in values if isinstance(name, str) and re.search(r"[.+]", name)), None):
            raise UserError(f"{self.source}: {key} has the key {odd!r}, which no run saves.")

    def _refusal(self, key: str, name: object) -> UserError:
        shown = " ".join(str(name).split())[:80]
        return not_trusted(self.source, f"its {key} names {shown!r}, which would be imported and called")
