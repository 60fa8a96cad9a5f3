"""Plain containers from YAML and from checkpoints, with limits on size and depth.

A few lines of YAML with nested aliases can expand to millions of nodes, and deeply nested brackets exhaust the stack.
Both are detected in the parser's events, before any object is built.
"""

import os
import re
from enum import Enum
from typing import Any

import yaml

from kernels.errors import UserError
from zoo.files.links import open_to_read

MOST_NODES = 100_000  # with aliases expanded; our largest config has a few hundred
DEEPEST = 100
LONGEST = 10_000  # characters of a number: reading one to the base of 60 takes quadratic time
MOST_BYTES = 1 << 24
_OPENING = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSING = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


# PyYAML's parser in C takes a tenth of the time; builds without libyaml lack it
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _RepeatedKey(Exception):
    """A mapping sets a key twice."""


class _LongNumber(Exception):
    """A number has more than `LONGEST` characters."""


class _Loader(_SafeLoader):
    """Reads 1e-3 as a number, as the config parser does (YAML 1.1 wants 1.0e-3), and refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:  # before `<<` adds keys that this mapping may replace
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            value, line = self.construct_object(key), key.start_mark.line + 1
            if value in lines:
                raise _RepeatedKey(f"line {line} sets {value!r} again, which line {lines[value]} sets; keep one")
            lines[value] = line
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return super().construct_yaml_int(_short(node))

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        return super().construct_yaml_float(_short(node))


def _short(node: yaml.ScalarNode) -> yaml.ScalarNode:
    if len(node.value) > LONGEST:
        raise _LongNumber
    return node


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


class _Dumper(yaml.SafeDumper):
    """Quotes a string that `_Loader` or the config parser would read as a number, such as '1e5'."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML folds a line break of Unicode to a space unless it is escaped
    style = '"' if {*"\x85\u2028\u2029"} & {*text} else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_multi_representer(Enum, lambda dumper, member: dumper.represent_data(member.value))
_Dumper.add_representer(str, _represent_text)


def read_yaml(path: str | os.PathLike[str], name: str = "config") -> Any:
    """Read a YAML file into plain containers.

    A UserError, which begins with `name`, if the file cannot be read, is not YAML, or is too large or too deep.
    """
    try:
        with open_to_read(path) as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{name}: {path} cannot be read as text: {error}") from None
    return decode_yaml(data, f"{name}: {path}")


def decode_yaml(data: bytes, name: str) -> Any:
    """As `read_yaml`, but from the bytes of a file; error messages begin with `name`."""
    if len(data) > MOST_BYTES:
        raise UserError(f"{name} has more than {MOST_BYTES:,} bytes.")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} cannot be read as text: {error}") from None
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> Any:
    """As `read_yaml`, but from a string; error messages begin with `name`."""
    try:
        _check_events(text, name)
        return yaml.load(text, Loader=_Loader)
    except UserError:  # which is a ValueError
        raise
    except _RepeatedKey as error:
        raise UserError(f"{name}, {error}.") from None
    except _LongNumber:
        raise UserError(f"{name} has a number of more than {LONGEST:,} characters.") from None
    except yaml.YAMLError as error:
        reason = str(_in_python(text) or error).replace(' in "<unicode string>"', "")  # PyYAML's name of any text
        raise UserError(f"{name} is not YAML: {' '.join(reason.split())}") from None
    # also invalid dates and numbers and unhashable keys
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise UserError(f"{name} is not YAML: {' '.join(str(error).split())}") from None


def _in_python(text: str) -> yaml.YAMLError | None:
    """Return the error of PyYAML's parser in Python, which names what libyaml's does not, such as a character."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, _OPENING) - isinstance(event, _CLOSING)
            if depth > DEEPEST:  # composing recurses
                return None
        yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        return error
    except RecursionError:  # nested deeply behind what libyaml does not understand
        return None
    return None


def dump_yaml(value: Any, one_line: bool = False) -> str:
    """Plain containers as YAML, which `parse_yaml` and the config parser read back as they were.

    With `one_line`, they are written in braces and brackets, without line breaks.
    """
    width = float("inf") if one_line else 80
    return yaml.dump(
        value, Dumper=_Dumper, default_flow_style=one_line, sort_keys=False, allow_unicode=True, width=width
    )


def check_plain(value: Any, name: str) -> None:
    """Raise a UserError that begins with `name` unless a value is plain containers within the limits.

    Shared parts count each time they occur; a part that contains itself is too deep.
    """
    nodes, waiting = 0, [(value, 1)]
    while waiting:
        part, depth = waiting.pop()
        nodes += 1
        if nodes > MOST_NODES:
            raise _too_large(name)
        if depth > DEEPEST:
            raise _too_deep(name)
        if isinstance(part, dict):
            for key in part:
                if not isinstance(key, str | int | float | None):
                    raise UserError(f"{name} has a key {key!r:.40}, which is not a string.")
            waiting += [(value, depth + 1) for value in part.values()]
        elif isinstance(part, list | tuple):
            waiting += [(value, depth + 1) for value in part]
        elif not isinstance(part, str | int | float | None):
            raise UserError(f"{name} holds a {type(part).__name__}, which does not belong in a config.")


def _check_events(text: str, name: str) -> None:
    """Raise a UserError if the text has too many nodes, with aliases expanded, or is nested too deeply."""
    sizes: dict[str, int] = {}  # anchor → nodes
    opened: list[tuple[str | None, int]] = []  # anchor, and nodes before it
    nodes = 0
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, _CLOSING):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
            continue
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise UserError(f"{name}: *{event.anchor} is an alias inside the node it refers to.")
            nodes += sizes.get(event.anchor, 1)  # an unknown alias is reported by the parser
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
            if isinstance(event, _OPENING):
                opened.append((event.anchor, nodes - 1))
            elif event.anchor is not None:
                sizes[event.anchor] = 1
        if nodes > MOST_NODES:
            raise _too_large(name)
        if len(opened) > DEEPEST:
            raise _too_deep(name)


def _too_large(name: str) -> UserError:
    return UserError(f"{name} has more than {MOST_NODES:,} values, with aliases expanded.")


def _too_deep(name: str) -> UserError:
    return UserError(f"{name} is nested more than {DEEPEST} levels deep.")
