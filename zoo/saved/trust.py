"""Vetting of foreign configs: nothing they name is imported, called, read or written without the user's consent.

The parser imports and calls whatever a `class_path` names, anywhere in a config. So a foreign config is vetted first,
along the signatures of the constructors. Where a component is expected it may name a matching class of the table in
`own.py`, a mixer that the user or an installed plug-in registered, or a class that the user names as well; elsewhere it
may name no class at all. Importing a class does not make it allowed.
"""

import collections.abc
import dataclasses
import inspect
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import lightning as L

from kernels import UserError
from zoo.config.classes import CLASSES
from zoo.config.imports import import_module
from zoo.config.keys import KEYS
from zoo.config.own import own_component, registered
from zoo.config.signatures import component, constructor, hints, subclasses
from zoo.data.text.corpus import is_built_in
from zoo.data.text.mixed_text import Source
from zoo.data.text.text_data import TextData
from zoo.data.text.tokenised_text import TokenisedText, ValidationSet
from zoo.files.safe_yaml import check_plain, parse_yaml
from zoo.lm.model import LanguageModel
from zoo.train.callbacks.samples import Samples
from zoo.train.optim import Optimisation

_NUMBERS = (NoneType, bool, int, float)
_MAPPINGS = (dict, collections.abc.Mapping)
_CONTAINERS = (*_MAPPINGS, list, tuple, collections.abc.Sequence)
_WORD = re.compile(r"\w*")
# Arguments whose strings are text and name nothing that is read, written or printed as a command.
_PLAIN_TEXT = (
    *((TokenisedText, name) for name in ("text_field", "bos_token", "eos_token")),
    (TextData, "suffixes"),
    *((Source, name) for name in ("text_field", "suffixes")),
    (ValidationSet, "text_field"),
    (Samples, "prompts"),
    (Optimisation, "train_only"),
)
_CORPORA = ((TextData, "path"), (Source, "path"), (ValidationSet, "path"))  # arguments that may name built-in text
_HOW = "if you trust who wrote it, add --trust (in Python: trust=True)"

# Keys of `trainer` whose strings choose among a few harmless options. A string under any other key names something to
# be built, read or written.
_CHOICES = {
    "accelerator": r"\w+",
    "strategy": r"auto|ddp\w*|fsdp\w*",
    "devices": r"auto|[-\d, ]+",
    "precision": r"[\w-]+",
    "gradient_clip_algorithm": r"\w+",
    "max_time": r"[\d:]+",
    "deterministic": "warn",
}

# Numbers by which a config starts processes, waits for machines or computes at length, before a batch is read.
_PROCESSES = max(8, os.cpu_count() or 1)
_MOST = {
    "data.num_workers": _PROCESSES,
    "data.preprocessing_workers": _PROCESSES,
    "data.vocab_size": 1 << 18,
    "data.max_characters": 1 << 30,
    "data.batch_size": 1 << 16,
    "data.sequence_length": 1 << 22,
    "trainer.devices": _PROCESSES,
    "trainer.num_nodes": 1,
    "samples.max_new_tokens": 1 << 16,
}
_NO_SIZES = ("base", "nominal_size", "original_length")  # numbers that may be larger than a model
# Sizes that no weight has: what a state or a cache holds grows with them.
_LIMITS = {"window_size": 1 << 20, "factor": 1 << 10}


@dataclass(frozen=True)
class UserInput:
    """Values that the user set, on the command line and in configs given there.

    `keys` are such as `data.path` and `data.class_path`, without `init_args`; `words` are the values that are strings,
    also inside lists and mappings; `pairs` has each of them after its key.
    """

    keys: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    pairs: frozenset[tuple[str, str]] = frozenset()


NOTHING = UserInput()


def user_input(items: Iterable[str | Mapping[str, Any]]) -> UserInput:
    """Collect what the user set in overrides `key=value` and in configs as plain containers."""
    keys: set[str] = set()
    pairs: set[tuple[str, str]] = set()

    def add(value: Any, key: str) -> None:
        keys.add(key)
        if isinstance(value, Mapping):
            for name, part in value.items():
                add(part, key if name == "init_args" else f"{key}.{name}".lstrip("."))
        elif isinstance(value, list):
            for part in value:
                add(part, key)
        elif isinstance(value, str):
            pairs.add((key, value))
            if key == "data":  # short for its class
                keys.add("data.class_path")

    for item in items:
        if isinstance(item, str):
            key, _, value = item.partition("=")
            # `trainer.callbacks+` stays a separate key, since it adds to the value and does not replace it
            key = key.replace(".init_args", "")
            add(parse_yaml(value, key) if value.startswith(("[", "{")) else value, key)
        else:
            add(item, "")
    return UserInput(frozenset(keys), frozenset(word for _, word in pairs), frozenset(pairs))


def vet_model(model: Any, source: object) -> None:
    """Check that building a foreign model imports and calls no foreign code.

    A UserError names the key and the class otherwise, and the file that the model's config comes from, `source`.
    """
    check_plain(model, f"{source}: its model")
    _Vetting(source, NOTHING).arguments(model, LanguageModel, "model")


def vet_run(config: Mapping[str, Any], source: object, user: UserInput) -> dict[str, Any]:
    """Check that evaluating or resuming a foreign run calls no foreign code and touches no files of its choice.

    A UserError names the key and the value otherwise. What the user set replaces values of the config.

    Returns:
        The config without the values that the user set, and without the run's initial weights.
    """
    check_plain(config, f"{source}: its config")
    vetted: dict[str, Any] = {}
    for key, value in config.items():
        vetting = _Vetting(source, user, files=key != "model")
        if key not in KEYS:
            raise UserError(f"{source} was not written by you, and sets {key}, which is not a key of a run; {_HOW}.")
        if key in ("data", *CLASSES) and not isinstance(value, Mapping):
            raise UserError(f"{source}: {key} is not a mapping, as a run saves it.")
        if key == "data":
            if (data := _without_user_input(value, user)) is not None:
                vetting.component(data, (L.LightningDataModule,), key)
                vetted[key] = data
        elif key in CLASSES:
            section = {name: part for name, part in value.items() if key == "model" or f"{key}.{name}" not in user.keys}
            if key == "optim":
                section["initial_weights"] = None  # those of the checkpoint replace them
            if key == "trainer":
                vetting.trainer(section)
            else:
                vetting.arguments(section, CLASSES[key], key)
            vetted[key] = section
        else:
            vetting.value(value, bool | int | None, key)
            vetted[key] = value
    _check_numbers(vetted, source)
    return vetted


def _check_numbers(config: Mapping[str, Any], source: object) -> None:
    """Refuse numbers of processes, machines and tokens that only the user may choose."""
    for key, most in _MOST.items():
        section, name = key.split(".")
        values = config.get(section) or {}
        number = (values.get("init_args") or {} if section == "data" else values).get(name)
        if isinstance(number, str) and number.strip().isdecimal():
            number = int(number[:20])
        if isinstance(number, int | float) and number > most:
            shown = number if number < 1e18 else "more than 10^18"  # Python refuses to write very long integers
            raise UserError(
                f"{source} was not written by you, and its {key} is {shown}, above {most}; set --{key} yourself, or, "
                f"{_HOW}."
            )


def _without_user_input(data: Mapping[str, Any], user: UserInput) -> Mapping[str, Any] | None:
    """A foreign `data` without the values that the user set; None if the user chose another class."""
    if "data.class_path" in user.keys:
        name = str(data.get("class_path")).rpartition(".")[2]
        if all(word.rpartition(".")[2] != name for word in user.words):
            return None
    arguments = data.get("init_args")
    if not isinstance(arguments, Mapping):
        return data
    return {**data, "init_args": {name: value for name, value in arguments.items() if f"data.{name}" not in user.keys}}


@dataclass(frozen=True)
class _Vetting:
    """Walks a config along the signatures of the constructors; with `files`, free-form strings name files."""

    source: object
    user: UserInput
    files: bool = False

    def arguments(self, values: Any, cls: Any, key: str) -> None:
        """Vet the arguments of a constructor."""
        if not isinstance(values, Mapping):
            raise UserError(f"{self.source}: {key} is not a mapping of arguments.")
        self._check_keys(values, key)
        types = hints(cls)
        parameters = inspect.signature(constructor(cls)).parameters
        for name, value in values.items():
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            if value != default and not _is_harmless(value, cls, name):
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
                raise self._refusal(key, value["class_path"], "imported and called")
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
        cls = self._allowed_class(name, bases, key)
        if cls is None:
            raise self._refusal(key, name, "imported and called")
        self.arguments({} if arguments is None else arguments, cls, key)

    def trainer(self, section: Mapping[str, Any]) -> None:
        """Vet the trainer's arguments, whose type hints allow almost any value to be a class or a file."""
        self._check_keys(section, "trainer")
        for name, value in section.items():
            allowed = _CHOICES.get(name)
            for word in [part for _, part in _leaves(value, name) if isinstance(part, str)]:
                if word not in self.user.words and not (allowed and value == word and re.fullmatch(allowed, word)):
                    raise self._refusal(f"trainer.{name}", word, "called, read or written")

    def _allowed_class(self, name: str, bases: tuple[type, ...], key: str) -> type | None:
        """The class of that name, if it is in the table of components, registered or named by the user; None if not."""
        if (own := own_component(name)) is not None:
            return own if issubclass(own, bases) else None
        module, _, last = name.rpartition(".")
        named = name in self.user.words
        if module and named and module not in sys.modules:
            try:
                import_module(module)
            except ImportError as error:
                raise UserError(f"{key}: {name!r} cannot be imported: {error}") from None
        for base in bases:
            if module:
                imported = sys.modules.get(module)
                candidates = [None if imported is None else vars(imported).get(last)]
            else:
                candidates = [cls for cls in subclasses(base) | {base} if cls.__name__ == name]
            for cls in candidates:
                if not isinstance(cls, type) or not issubclass(cls, base):
                    continue
                if named or registered(cls):
                    return cls
        return None

    def _text(self, value: str, options: tuple[Any, ...], key: str) -> None:
        """Vet a string where no class is expected."""
        if all(get_origin(option) is Literal or option in _NUMBERS for option in options):
            return  # the parser checks choices
        if str not in options and not _WORD.fullmatch(value):  # it might be parsed as YAML that names a class
            raise self._refusal(key, value, "imported and called")
        if self.files and (key, value) not in self.user.pairs:
            raise self._refusal(key, value, "read or written")

    def _check_keys(self, values: Mapping[Any, Any], key: str) -> None:
        """Refuse keys that the parser would split at dots, or take as additions."""
        if odd := next((name for name in values if isinstance(name, str) and re.search(r"[.+]", name)), None):
            raise UserError(f"{self.source}: {key} has the key {odd!r}, which no run saves.")

    def _refusal(self, key: str, name: object, action: str) -> UserError:
        shown = " ".join(str(name).split())[:80]
        return UserError(
            f"{self.source} was not written by you, and its {key} names {shown!r}, which would be {action}; {_HOW}."
        )


def _is_harmless(value: Any, cls: Any, name: str) -> bool:
    """Return whether an argument is text, or names built-in text where the code resolves such names."""

    def among(arguments: tuple[tuple[type, str], ...]) -> bool:
        return isinstance(cls, type) and any(name == key and issubclass(cls, owner) for owner, key in arguments)

    if among(_PLAIN_TEXT):
        return all(isinstance(part, str) for part in (value if isinstance(value, list) else [value]))
    return among(_CORPORA) and isinstance(value, str) and is_built_in(value)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """The values in plain containers, each after its key, which has no `init_args`."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _leaves(part, key if name == "init_args" else f"{key}.{name}")
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part, key)
    else:
        yield key, value


def check_sizes(model: Mapping[str, Any], weights: Mapping[str, Any], path: object) -> None:
    """Raise a UserError if a number in a foreign `model` config is larger than its weights (name → spec) allow.

    Building 300,000 layers takes minutes even without memory for their weights. What passes is small enough to be built
    on the meta device, where names and shapes are compared exactly.
    """
    elements = sum(math.prod(tensor.shape) for tensor in weights.values())
    for key, number in _leaves(model, "model"):
        if not isinstance(number, int | float) or isinstance(number, bool):
            continue
        name = key.rpartition(".")[2]
        most = len(weights) if name == "num_layers" else _LIMITS.get(name, elements)
        if name not in _NO_SIZES and number > most:
            shown = f"{number:,}" if number < 1e18 else "more than 10^18"  # Python refuses to write very long integers
            raise UserError(
                f"{path} does not fit the model: {key} is {shown} in its config, which is too large for its weights "
                f"({len(weights):,} tensors of {elements:,} numbers)."
            )
