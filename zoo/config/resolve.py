"""Resolves a config against the signatures of constructors: every value is checked, and defaults are filled in.

All mistakes are collected; the first one is raised: an unknown key before a wrong value before a missing one.
"""

import dataclasses
import enum
import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import timedelta
from pathlib import PurePath
from typing import Any, Literal, NamedTuple, get_args, get_origin

from jsonargparse import Namespace

import mixers
from kernels import UserError
from zoo.config.explain import missing, unknown, wrong_value
from zoo.config.imports import import_module, import_object, import_path
from zoo.config.jsonargparse_internals import entries
from zoo.config.merge import Former, Text
from zoo.config.signatures import (
    Parameter,
    alternatives,
    component,
    constructor,
    is_group,
    is_ours,
    parameters,
    passed_by_position,
    settable,
    subclasses,
    takes_any_name,
)
from zoo.config.suggest import is_certain
from zoo.files.safe_yaml import parse_yaml

_NUMBERS = (int, float, bool)
_DURATION = re.compile(r"(?:(?P<days>-?\d+) days?, )?(?P<hours>\d+):(?P<minutes>\d\d):(?P<seconds>\d\d(?:\.\d+)?)")
_MOST_EXACT = 1 << 53  # floats above it skip whole numbers
_ABSENT = object()


class Group(NamedTuple):
    """A key below which the arguments of a class are; `defaults` replace those of its signature."""

    cls: Any
    defaults: Mapping[str, Any] = {}


Keys = Mapping[str, Parameter | Group]


def resolved(config: Mapping[str, Any], keys: Keys, other_names: Iterable[str] = ()) -> Namespace:
    """Return a config with the value of every key, in plain containers and namespaces.

    Args:
        config: The result of `merged`.
        keys: The keys that exist.
        other_names: Further names that may be meant by an unknown key.

    Raises:
        UserError: A key does not exist, a value does not fit its type, or a required one is missing.
    """
    resolver = Resolver(keys)
    resolver.names |= {*other_names}
    result = resolver.all(config)
    resolver.check()
    return result


def built(value: Any, hint: Any) -> Any:
    """Return what a resolved value of some type describes: a component, or a container of components."""
    if isinstance(value, Namespace) and "class_path" in value:
        cls: Any = import_object(value.class_path)
        option = next((option for option in alternatives(hint) if _takes(option, cls)), None)
        arguments = built_arguments(cls, value.get("init_args") or Namespace())
        arguments |= value.get("dict_kwargs") or {}
        # a type Callable[[…], C] takes a function that builds a C from the arguments that are passed by position
        return functools.partial(cls, **arguments) if get_origin(option) is Callable else cls(**arguments)
    options = alternatives(hint)
    if isinstance(value, Namespace):
        fields: Any = next((option for option in options if is_group(option)), None)
        return Namespace(built_arguments(fields, value)) if fields is None else fields(**built_arguments(fields, value))
    if isinstance(value, dict):
        inner = next((get_args(option)[1] for option in options if _is_mapping(option) and get_args(option)), None)
        return {key: built(part, inner) for key, part in value.items()}
    if isinstance(value, list | tuple):
        option = next((option for option in options if _is_list(option)), None)
        kind = (get_origin(option) or option) if option is not None else None
        kind = kind if kind in (set, frozenset) else type(value)
        return kind(built(part, _inner(option, number)) for number, part in enumerate(value))
    if isinstance(value, int) and not isinstance(value, bool) and float in options and int not in options:
        return float(value)
    if isinstance(value, str) and str not in options:
        for option in options:
            if isinstance(option, type) and issubclass(option, enum.Enum) and value in option.__members__:
                return option[value]
            if isinstance(option, type) and issubclass(option, PurePath):
                return option(value)
            if option is timedelta and (match := _DURATION.fullmatch(value)) is not None:
                return timedelta(**{unit: float(number) for unit, number in match.groupdict("0").items()})
        literals = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
        if "." in value and value not in literals and any(map(_names_object, options)):
            return import_object(value)
    return value


def built_arguments(cls: Any, arguments: Namespace) -> dict[str, Any]:
    """Build the arguments of a constructor; see `built`."""
    types = {} if cls is None else parameters(cls)
    return {name: built(value, types[name].hint if name in types else None) for name, value in entries(arguments)}


def _takes(option: Any, cls: Any) -> bool:
    base = component(option)
    return base is not None and isinstance(cls, type) and issubclass(cls, base)


def _is_open(option: Any) -> bool:
    """Return whether a type takes any value, since it is not known, or not a type that is checked."""
    return option in (None, Any, object) or (not isinstance(option, type) and get_origin(option) is None)


def _names_object(option: Any) -> bool:
    """Return whether text names a function or class of this type by its dotted path, which is not called."""
    return option is type or get_origin(option) in (type, Callable)


def _is_mapping(option: Any) -> bool:
    origin = get_origin(option) or option
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _is_list(option: Any) -> bool:
    origin = get_origin(option) or option
    return (
        isinstance(origin, type)
        and not issubclass(origin, Mapping | str | bytes)
        and (issubclass(origin, Collection) or origin is Iterable)
        and (origin is not option or origin in (list, tuple, set, frozenset))
    )


def _inner(option: Any, number: int) -> Any:
    """The type of an element of a list, or of a tuple of a fixed length."""
    inner = get_args(option)
    fixed = get_origin(option) is tuple and inner[-1:] != (...,)
    return inner[number] if fixed and number < len(inner) else inner[0] if inner else None


class Resolver:
    """Resolves configs, and collects the mistakes in them.

    Args:
        keys: See `resolved`.

    Attributes:
        names: All keys that exist, with those of the classes in the configs.
    """

    def __init__(self, keys: Keys):
        self._keys = keys
        self.names: set[str] = set()
        self._unknown: list[tuple[str, str, Any]] = []  # keys, the part of each that exists, and its class
        self._nulls: list[str] = []  # sentences about values that are null and must not be
        self._mistakes: list[str] = []
        self._missing: list[str] = []  # sentences about keys that are required
        for key, entry in keys.items():
            self.names |= {key} if isinstance(entry, Parameter) else {f"{key}.{name}" for name in settable(entry.cls)}

    def check(self) -> None:
        """Raise a UserError about the first mistake."""
        self.check_keys()
        if sentences := self._mistakes + self._missing:
            raise UserError(sentences[0])

    def check_keys(self, partial: Collection[str] = ()) -> None:
        """Raise a UserError about the first key that does not exist, or that is null and must not be.

        Args:
            partial: Top-level groups that were left out. The check ends at a key that may be meant for one of them.
        """
        for key, group, cls in self._unknown:
            if partial and not is_certain(key, group, self.names, partial):
                return
            matrix = not (isinstance(cls, type) and issubclass(cls, mixers.TokenMixer)) or issubclass(
                cls, mixers.LinearMixer
            )
            if not matrix and key.rpartition(".")[2] in settable(mixers.Expanded):
                raise UserError(f"{key}: {cls.__name__} has no matrix state to expand")
            raise UserError(unknown(key, group, self.names))
        if self._nulls:
            raise UserError(self._nulls[0])

    def all(self, config: Mapping[str, Any]) -> Namespace:
        """Resolve a whole config."""
        values: dict[str, Any] = {}
        for key, value in config.items():
            entry = self._keys.get(key)
            if entry is None:
                self._note_unknown(key, value)
            elif isinstance(entry, Parameter):
                values[key] = self._part_or_null(value, entry, key)
            elif isinstance(value, dict):
                values[key] = self._arguments(entry.cls, 0, value, key, entry.defaults)
            elif value is not None:
                self._mistakes.append(wrong_value(key, dict, _plain(value)))
        for key, entry in self._keys.items():
            if key not in values and key not in config:
                if not isinstance(entry, Parameter):
                    values[key] = self._arguments(entry.cls, 0, {}, key, entry.defaults)
                elif entry.required:
                    self._missing.append(missing(key))
                else:
                    values[key] = self._default(entry.default, entry.hint)
        return Namespace({key: values[key] for key in self._keys if key in values})

    def defaults(self, cls: Any) -> Namespace:
        """The arguments of a constructor that a config does not have to set."""
        return self._arguments(cls, 0, {}, "")

    def _note_unknown(self, key: str, value: Any) -> None:
        group = key.rpartition(".")[0]
        while isinstance(value, dict) and len(value) == 1:  # the whole key, as in an override
            ((part, value),) = value.items()
            key += f".{part}"
        self._unknown.append((key, group, None))

    def _part_or_null(self, value: Any, parameter: Parameter, key: str) -> Any:
        """As `_part`, but null is allowed for every type, except numbers and parts of this project."""
        value = None if isinstance(value, Text) and value.is_null else value
        if value is None:
            options = alternatives(parameter.hint)
            group = "." not in key
            if parameter.default is not None and all(
                each in _NUMBERS or (_is_own_part(each) and not group) for each in options
            ):
                self._nulls.append(wrong_value(key, parameter.hint, None))
            return None
        return self._part(value, parameter.hint, key, parameter.default)

    def _part(self, value: Any, hint: Any, key: str, default: Any = _ABSENT) -> Any:
        """Resolve a value; what does not fit its type is noted as a mistake."""
        options = alternatives(hint)
        if isinstance(value, Mapping):
            result = self._mapping(value, options, key, default)
        elif isinstance(value, str):
            result = self._text(value, options, key)
        elif isinstance(value, list | tuple):
            result = self._list(value, options, key)
        else:
            result = _scalar(value, options)
        if result is _ABSENT:
            self._mistakes.append(wrong_value(key, hint, _plain(value)))
            return value
        return result

    def _text(self, value: str, options: tuple[Any, ...], key: str) -> Any:
        """Resolve text: a number or list that it spells, itself, or the class that it names, in this order."""
        literals = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
        if isinstance(value, Text):
            parsed = value.parsed
            if not isinstance(parsed, bool) and parsed in literals:
                return parsed
            if isinstance(parsed, list) and (listed := self._list(parsed, options, key)) is not _ABSENT:
                return listed
        else:
            parsed = value if str in options else _number_in(value)
        if str(value) in literals:
            return str(value)
        if not isinstance(parsed, str | list | Mapping) and (number := _scalar(parsed, options)) is not _ABSENT:
            return number
        if str in options:
            return str(value)
        for option in options:
            if isinstance(option, type) and issubclass(option, enum.Enum) and value in option.__members__:
                return str(value)
            if isinstance(option, type) and issubclass(option, PurePath):
                return str(value)
            if option is timedelta and _DURATION.fullmatch(value):
                return str(value)
        if any(map(component, options)) and (isinstance(parsed, str) or isinstance(value, Text)):
            return self._component(str(value), {}, options, key)
        if any(_is_open(option) or _names_object(option) for option in options):
            return str(value) if isinstance(parsed, str) else parsed
        return _ABSENT

    def _list(self, value: Iterable[Any], options: tuple[Any, ...], key: str) -> Any:
        parts = [*value]
        for option in options:
            if not _is_list(option) or (
                get_origin(option) is tuple and ... not in get_args(option) and len(get_args(option)) != len(parts)
            ):
                continue
            values = [self._part(part, _inner(option, number), key) for number, part in enumerate(parts)]
            return tuple(values) if tuple in (option, get_origin(option)) else values
        return parts if any(map(_is_open, options)) else _ABSENT

    def _mapping(self, value: Mapping[str, Any], options: tuple[Any, ...], key: str, default: Any) -> Any:
        bases = [option for option in options if component(option) is not None]
        path = value.get("class_path")
        if bases and path is not None:
            return self._component(path, value, options, key)
        for option in options:
            if is_group(option):
                instance = default if dataclasses.is_dataclass(default) and not isinstance(default, type) else None
                defaults = {} if instance is None else _fields(instance)
                return self._arguments(option, 0, value, key, defaults)
            if _is_mapping(option) and path is None:
                return self._dictionary(value, option, key)
        if bases:
            return self._unnamed(value, options, key, default)
        if any(map(_is_open, options)):
            if isinstance(path, str):  # of a parameter without a type
                return self._component(path, value, (object,), key)
            return {name: _deep_plain(part) for name, part in value.items()}
        return _ABSENT

    def _dictionary(self, value: Mapping[str, Any], option: Any, key: str) -> dict[Any, Any]:
        """Resolve a mapping of any keys; a key that is null is removed, unless its values may be null."""
        of_keys, inner = get_args(option) or (None, None)
        removable = inner is not None and type(None) not in alternatives(inner)
        values = {}
        for name, part in value.items():
            self.names.add(f"{key}.{name}")
            none = part is None or (isinstance(part, Text) and part.is_null)
            if not (none and removable):
                number = of_keys is int and name.lstrip("-").isdecimal()
                values[int(name) if number else name] = None if none else self._part(part, inner, f"{key}.{name}")
        return values

    def _unnamed(self, value: Mapping[str, Any], options: tuple[Any, ...], key: str, default: Any) -> Any:
        """Resolve arguments of a component whose class is not named: that of the default, or else the base class."""
        if isinstance(default, functools.partial):
            return self._spec(default.func, value, options, key, default.keywords)
        if isinstance(default, type) and any(_takes(option, default) for option in options):
            return self._spec(default, value, options, key)
        base = next(base for option in options if (base := component(option)) is not None)
        if constructor(base) is object.__init__:
            self._mistakes.append(missing(key))
            return value
        implied = is_ours(base) and not inspect.isabstract(base) and {*value} <= {*settable(base)}
        return self._spec(base, value, options, key) if implied else _ABSENT

    def _component(self, path: Any, value: Mapping[str, Any], options: tuple[Any, ...], key: str) -> Any:
        """Resolve a component from its class path and its arguments."""
        named = find_class(path, options)
        if named is None:
            return _ABSENT
        if not isinstance(named, type):
            return path  # a function that builds the component
        return self._spec(named, value, options, key)

    def _spec(
        self,
        cls: Any,
        value: Mapping[str, Any],
        options: tuple[Any, ...],
        key: str,
        defaults: Mapping[str, Any] | None = None,
    ) -> Namespace:
        option = next((option for option in options if _takes(option, cls)), None)
        value = {name: part for name, part in value.items() if not _was_default(part, name, options)}
        spec = Namespace(class_path=import_path(cls))
        arguments = self._arguments(cls, passed_by_position(option), value, key, defaults or {})
        if vars(arguments):
            spec.init_args = arguments
        if isinstance(extra := value.get("dict_kwargs"), Mapping):
            names = settable(cls)
            if others := {name: _deep_plain(part) for name, part in extra.items() if name not in names}:
                spec.dict_kwargs = others
        return spec

    def _arguments(
        self,
        cls: Any,
        by_position: int,
        config: Mapping[str, Any],
        key: str,
        defaults: Mapping[str, Any] = {},
    ) -> Namespace:
        """Resolve the arguments of a constructor; `defaults` replace those of its signature."""
        all_parameters = parameters(cls)
        usable = {name: all_parameters[name] for name in settable(cls, by_position)}
        if key:  # not of defaults
            self.names |= {f"{key}.{name}" for name in usable}
        extra = config.get("dict_kwargs") if takes_any_name(cls) else None
        if isinstance(extra, Mapping):
            config = {**extra, **config}
        values: dict[str, Any] = {}
        for name, value in config.items():
            if isinstance(value, Former):
                if name in usable and (value := self._taken_over(value, usable[name], f"{key}.{name}")) is not _ABSENT:
                    values[name] = value
            elif name in usable:
                parameter = usable[name]._replace(default=defaults.get(name, usable[name].default))
                values[name] = self._part_or_null(value, parameter, f"{key}.{name}")
            elif isinstance(self._keys.get(key), Group):
                self._note_unknown(f"{key}.{name}", value)
            elif name == "dict_kwargs" and takes_any_name(cls):
                if not isinstance(value, Mapping):
                    self._mistakes.append(wrong_value(f"{key}.{name}", dict, _plain(value)))
            elif name != "class_path" and not (isinstance(extra, Mapping) and name in extra):
                self._unknown.append((f"{key}.{name}", key, cls))
        for name, parameter in usable.items():
            if name not in values and not parameter.required:
                default = self._default(defaults.get(name, parameter.default), parameter.hint)
                if default is not _ABSENT:
                    values[name] = default
        if key and (absent := [name for name, each in usable.items() if each.required and name not in values]):
            if isinstance(self._keys.get(key), Group):
                self._missing += [missing(f"{key}.{name}") for name in absent]
            else:
                self._mistakes.append(f"{key}: {cls.__name__} needs a value for {', '.join(absent)}, under init_args")
        return Namespace({name: values[name] for name in usable if name in values})

    def _taken_over(self, former: Former, parameter: Parameter, key: str) -> Any:
        """Resolve an argument of the class that was replaced; absent if it does not fit."""
        resolver = Resolver({})
        value = resolver._part_or_null(former.value, parameter, key)
        return _ABSENT if resolver._unknown or resolver._nulls or resolver._mistakes else value

    def _default(self, default: Any, hint: Any) -> Any:
        """A default in plain containers and namespaces; absent if it cannot be written in a config."""
        options = alternatives(hint)
        if isinstance(default, functools.partial) and any(_takes(option, default.func) for option in options):
            return self._spec(default.func, {}, options, "", default.keywords)
        if isinstance(default, type) and any(_takes(option, default) for option in options):
            return self._spec(default, {}, options, "")
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            return self._arguments(type(default), 0, {}, "", _fields(default))
        if isinstance(default, Namespace):
            return self._component(default.class_path, {}, options, "")
        return _deep_plain(default)


def find_class(path: Any, options: Iterable[Any]) -> Any:
    """The class that a path names, if it is certain and fits one of the types; a function that returns one, too."""
    if not isinstance(path, str):
        return None
    options = [*options]
    bases = [base for option in options if (base := object if option is object else component(option)) is not None]
    module, _, name = path.rpartition(".")
    if not module:
        classes = {cls for base in bases for cls in subclasses(base) | {base} if cls.__name__ == name}
        return classes.pop() if len(classes) == 1 and bases != [object] else None
    try:
        named = getattr(import_module(module), name)
    except SyntaxError as error:
        line = f"{error.filename}, line {error.lineno}," if error.filename else module  # none for a null character
        raise UserError(f"{line} is not Python ({error.msg})") from None
    except Exception:  # the sentence about the class says what is wrong
        return None
    if isinstance(named, type):
        return named if any(issubclass(named, base) for base in bases) else None
    if callable(named) and any(get_origin(option) is Callable for option in options):
        returned = getattr(named, "__annotations__", {}).get("return")
        return named if isinstance(returned, type) and any(issubclass(returned, base) for base in bases) else None
    return None


def _was_default(part: Any, name: str, options: Iterable[Any]) -> bool:
    """Return whether an argument of a class that was replaced was its default; the new class may have another one."""
    if not isinstance(part, Former):
        return False
    module = part.class_path.rpartition(".")[0]
    former = find_class(part.class_path, options) if not module or module in sys.modules else None
    parameter = parameters(former).get(name) if isinstance(former, type) else None
    return parameter is not None and bool(parameter.default == _plain(part.value))


def _number_in(text: str) -> Any:
    """The number, truth value or null that quoted text in a config spells; else the text. It is never a container."""
    try:
        value = parse_yaml(text, "value") if text and text[0] not in "{[&*!|>'\"" else text
    except UserError:
        return text
    return value if isinstance(value, bool | int | float) else text


def _scalar(value: Any, options: tuple[Any, ...]) -> Any:
    """A number or truth value as the type of its key has it: 100.0 is 100 where the key takes whole numbers.

    0.0 and 1.0 stay, since for keys that take both kinds, 1 is one batch and 1.0 is all of them.
    """
    words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
    if any(type(word) is type(value) and word == value for word in words):
        return value
    if any(map(_is_open, options)) or (isinstance(value, bool) and bool in options):
        return value
    if isinstance(value, bool):
        return _ABSENT
    if isinstance(value, float) and 1 < abs(value) < _MOST_EXACT and value.is_integer() and int in options:
        return int(value)
    if isinstance(value, int) and int in options:
        return value
    if isinstance(value, int | float) and float in options:
        return value
    return value if isinstance(value, tuple(option for option in options if isinstance(option, type))) else _ABSENT


def _fields(instance: Any) -> dict[str, Any]:
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance) if field.init}


def _plain(value: Any) -> Any:
    """A value for a sentence: what an override spells, if it is not text."""
    return value.parsed if isinstance(value, Text) else value


def _deep_plain(value: Any) -> Any:
    """A copy of plain containers, in which overrides are parsed; absent if something in it is not plain."""
    if isinstance(value, Text):
        value = value.parsed
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value, str | int) else value.name
    if isinstance(value, timedelta | PurePath):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: _deep_plain(part) for name, part in _fields(value).items()}
        return _ABSENT if any(part is _ABSENT for part in fields.values()) else Namespace(fields)
    if isinstance(value, Mapping):
        parts = {key: _deep_plain(part) for key, part in value.items()}
        return _ABSENT if any(part is _ABSENT for part in parts.values()) else parts
    if isinstance(value, list | tuple):
        listed = [_deep_plain(part) for part in value]
        return _ABSENT if any(part is _ABSENT for part in listed) else type(value)(listed)
    return value if value is None or isinstance(value, str | int | float) else _ABSENT


def _is_own_part(hint: Any) -> bool:
    """Return whether a type is a component of this project, or a group of its arguments."""
    part = hint if is_group(hint) else component(hint)
    return isinstance(part, type) and is_ours(part)
