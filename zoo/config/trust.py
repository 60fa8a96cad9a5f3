"""Configs that somebody else wrote: nothing in them is imported, called, read or written without a word of the user.

The parser imports and calls what a `class_path` names, wherever one may stand. So a foreign config is vetted first, by
a walk along the constructors' signatures. Where a component is expected it may name a class of that kind which is there
already, of this project or imported by the user, or one that the user names, too; and where none is expected, none.
"""

import collections.abc
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import lightning as L

import mixers
from kernels import UserError
from zoo.config.components import component, constructor, hints, is_ours, subclasses
from zoo.config.parser import CLASSES, KEYS
from zoo.files.safe_yaml import check_plain, parse_yaml
from zoo.lm.model import LanguageModel

_NUMBERS = (NoneType, bool, int, float)
_MAPPINGS = (dict, collections.abc.Mapping)
_CONTAINERS = (*_MAPPINGS, list, tuple, collections.abc.Sequence)
_WORD = re.compile(r"\w*")
_NO_FILES = ("text_field", "bos_token", "eos_token")  # text in `data` that names neither a file nor a choice
_HOW = "if you trust who wrote it, add --trust (in Python: trust=True)"

# Keys of `trainer` whose text chooses among a few things, all of them harmless. What any other one names is built, read
# or written.
_CHOICES = {
    "accelerator": r"\w+",
    "strategy": r"auto|ddp\w*|fsdp\w*",
    "devices": r"auto|[-\d, ]+",
    "precision": r"[\w-]+",
    "gradient_clip_algorithm": r"\w+",
    "max_time": r"[\d:]+",
    "deterministic": "warn",
}


@dataclass(frozen=True)
class Own:
    """What a user said, on the command line and in configs given there.

    Args:
        keys: The keys that were set, such as `data.path` and `data.class_path`, without `init_args`.
        words: The values that are text, and the texts in those that are lists or mappings.
    """

    keys: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()


NOTHING = Own()


def own_words(items: Iterable[str | Mapping[str, Any]]) -> Own:
    """What a user said: overrides `key=value`, and configs as plain containers."""
    keys: set[str] = set()
    words: set[str] = set()

    def add(value: Any, key: str) -> None:
        keys.add(key)
        if isinstance(value, Mapping):
            for name, part in value.items():
                add(part, key if name == "init_args" else f"{key}.{name}".lstrip("."))
        elif isinstance(value, list):
            for part in value:
                add(part, key)
        elif isinstance(value, str):
            words.add(value)
            if key == "data":  # in short for its class
                keys.add("data.class_path")

    for item in items:
        if isinstance(item, str):
            key, _, value = item.partition("=")
            # `trainer.callbacks+` stays another key, since it takes nothing away
            key = key.replace(".init_args", "")
            add(parse_yaml(value, key) if value.startswith(("[", "{")) else value, key)
        else:
            add(item, "")
    return Own(frozenset(keys), frozenset(words))


def vet_model(model: Any, source: object) -> None:
    """See that building a model imports and calls nothing of somebody else's.

    Args:
        model: What stands under `model` in a config.
        source: The file that it comes from.

    Raises:
        UserError: Something would be; says which key names what.
    """
    check_plain(model, f"{source}: its model")
    _Vetting(source, NOTHING).arguments(model, LanguageModel, "model")


def vet_run(config: Mapping[str, Any], source: object, own: Own) -> dict[str, Any]:
    """See that evaluating or continuing a run calls, reads and writes nothing of somebody else's.

    Args:
        config: The whole config of the run.
        source: The file that it comes from.
        own: What the user said, which counts instead.

    Returns:
        The config without what the user said otherwise, and without the weights that the run began with.

    Raises:
        UserError: Something would be called, read or written; says which key names what.
    """
    check_plain(config, f"{source}: its config")
    plain, files = _Vetting(source, own), _Vetting(source, own, files=True)
    vetted: dict[str, Any] = {}
    for key, value in config.items():
        vetting = files if key in ("data", "checkpoints") else plain
        if key not in KEYS:
            raise UserError(f"{source} was not written by you, and sets {key}, which is no part of a run; {_HOW}.")
        if key in ("data", *CLASSES) and not isinstance(value, Mapping):
            raise UserError(f"{source}: {key} is no mapping, as a run saves it.")
        if key == "data":
            if (data := _own_data(value, own)) is not None:
                vetting.component(data, (L.LightningDataModule,), key)
                vetted[key] = data
        elif key in CLASSES:
            section = {name: part for name, part in value.items() if key == "model" or f"{key}.{name}" not in own.keys}
            if key == "trainer":
                vetting.trainer(section)
            else:
                vetting.arguments(section, CLASSES[key], key)
            vetted[key] = section
        else:
            vetting.value(value, bool | int | None, key)
            vetted[key] = value
    if vetted.get("optim"):
        vetted["optim"]["initial_weights"] = None
    return vetted


def _own_data(data: Mapping[str, Any], own: Own) -> Mapping[str, Any] | None:
    """A foreign `data` without what the user said otherwise; None if the user chose another class."""
    if "data.class_path" in own.keys:
        name = str(data.get("class_path")).rpartition(".")[2]
        if all(word.rpartition(".")[2] != name for word in own.words):
            return None
    arguments = data.get("init_args")
    if not isinstance(arguments, Mapping):
        return data
    return {**data, "init_args": {name: value for name, value in arguments.items() if f"data.{name}" not in own.keys}}


@dataclass(frozen=True)
class _Vetting:
    """The walk along the signatures.

    Args:
        source: The file that the config comes from.
        own: What the user said.
        files: Whether text without a choice names what is read or written.
    """

    source: object
    own: Own
    files: bool = False

    def arguments(self, values: Any, cls: Any, key: str) -> None:
        """Vet the arguments of a constructor."""
        if not isinstance(values, Mapping):
            raise UserError(f"{self.source}: {key} is no mapping of arguments.")
        self._check_keys(values, key)
        types = hints(cls)
        parameters = inspect.signature(constructor(cls)).parameters
        for name, value in values.items():
            default = parameters[name].default if name in parameters else inspect.Parameter.empty
            if value != default:
                self.value(value, types.get(name), f"{key}.{name}")

    def value(self, value: Any, hint: Any, key: str) -> None:
        """Vet what stands where a type is expected."""
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        bases = tuple(base for option in options if (base := component(option)) is not None)
        parts = next((option for option in options if get_origin(option) in _CONTAINERS), None)
        fields = next((option for option in options if dataclasses.is_dataclass(option)), None)
        if value is None or isinstance(value, bool | int | float):
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
        """Vet what names a class, and maybe its arguments."""
        name, arguments = value, None
        if isinstance(value, Mapping):
            self._check_keys(value, key)
            if surplus := sorted(set(value) - {"class_path", "init_args"}):
                raise UserError(f"{self.source}: {key} has {surplus[0]} beside class_path and init_args.")
            name, arguments = value.get("class_path"), value.get("init_args")
        if not isinstance(name, str):
            raise UserError(f"{self.source}: {key} names no class.")
        cls = self._found(name, bases, key)
        if cls is None:
            raise self._refusal(key, name, "imported and called")
        self.arguments({} if arguments is None else arguments, cls, key)

    def trainer(self, section: Mapping[str, Any]) -> None:
        """Vet the trainer's arguments, whose types let nearly everything be a class or a file."""
        self._check_keys(section, "trainer")
        for name, value in section.items():
            allowed = _CHOICES.get(name)
            for word in _texts(value):
                if word not in self.own.words and not (allowed and value == word and re.fullmatch(allowed, word)):
                    raise self._refusal(f"trainer.{name}", word, "called, read or written")

    def _found(self, name: str, bases: tuple[type, ...], key: str) -> type | None:
        """The class of a name that may be built, which is there already or is the user's word, too."""
        mixers.names()  # plug-ins that are installed are there
        module, _, last = name.rpartition(".")
        named = name in self.own.words
        if module and named and module not in sys.modules:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise UserError(f"{key}: {name!r} cannot be imported: {error}") from None
        for base in bases:
            if module:
                there = sys.modules.get(module)
                candidates = [None if there is None else vars(there).get(last)]
            else:
                candidates = [cls for cls in subclasses(base) | {base} if cls.__name__ == name]
            for found in candidates:
                if not isinstance(found, type) or not issubclass(found, base):
                    continue
                if named or is_ours(found) or is_ours(base):
                    return found
        return None

    def _text(self, value: str, options: tuple[Any, ...], key: str) -> None:
        """Vet a text where no class is expected."""
        if all(get_origin(option) is Literal or option in _NUMBERS for option in options):
            return  # the parser compares it with the choices
        if str not in options and not _WORD.fullmatch(value):  # it might be read as YAML with a class in it
            raise self._refusal(key, value, "imported and called")
        harmless = value.startswith("embedded:") or key.rpartition(".")[2] in _NO_FILES
        if self.files and not harmless and value not in self.own.words:
            raise self._refusal(key, value, "read or written")

    def _check_keys(self, values: Mapping[Any, Any], key: str) -> None:
        """Refuse keys that the parser would take for several, or for an addition."""
        if odd := next((name for name in values if isinstance(name, str) and re.search(r"[.+]", name)), None):
            raise UserError(f"{self.source}: {key} has the key {odd!r}, which no run saves.")

    def _refusal(self, key: str, name: object, deed: str) -> UserError:
        said = " ".join(str(name).split())[:80]
        return UserError(
            f"{self.source} was not written by you, and its {key} names {said!r}, which would be {deed}; {_HOW}."
        )


def _texts(value: Any) -> list[str]:
    """All text in plain containers, keys left out."""
    if isinstance(value, Mapping):
        return [text for part in value.values() for text in _texts(part)]
    if isinstance(value, list | tuple):
        return [text for part in value for text in _texts(part)]
    return [value] if isinstance(value, str) else []
