"""Plain containers from YAML and from checkpoints."""

import os
import re
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from kernels.errors import UserError

DEEPEST = 100  # libyaml's stack overflows if nodes are nested deeply


# PyYAML's parser in C takes a tenth of the time; builds without libyaml lack it
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _RepeatedKey(Exception):
    """A mapping sets a key twice."""


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

    A UserError, which begins with `name`, if the file cannot be read or is not YAML.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{name}: {path} cannot be read as text: {error}") from None
    return decode_yaml(data, f"{name}: {path}")


def decode_yaml(data: bytes, name: str) -> Any:
    """As `read_yaml`, but from the bytes of a file; error messages begin with `name`."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{name} cannot be read as text: {error}") from None
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> Any:
    """As `read_yaml`, but from a string; error messages begin with `name`."""
    try:
        _check_depth(text, name)
        return yaml.load(text, Loader=_Loader)
    except UserError:  # which is a ValueError
        raise
    except _RepeatedKey as error:
        raise UserError(f"{name}, {error}.") from None
    except yaml.YAMLError as error:
        reason = str(_in_python(text) or error).replace(' in "<unicode string>"', "")  # PyYAML's name of any text
        raise UserError(f"{name} is not YAML: {' '.join(reason.split())}") from None
    # also invalid dates and numbers and unhashable keys
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{name} is not YAML: {' '.join(str(error).split())}") from None


def _check_depth(text: str, name: str) -> None:
    anchors: list[str | None] = []  # of the open nodes
    for event in yaml.parse(text, Loader=_SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchors.pop()
        elif isinstance(event, yaml.AliasEvent) and event.anchor in anchors:
            raise UserError(f"{name}: *{event.anchor} is an alias inside the node it refers to.")
        if len(anchors) > DEEPEST:
            raise _too_deep(name)


def _in_python(text: str) -> Exception | None:
    """Return the error of PyYAML's parser in Python, which names what libyaml's does not, such as a character."""
    try:
        yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        return error
    except RecursionError:
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
    """Raise a UserError that begins with `name` unless a value is plain containers, nested to at most 100 levels."""
    waiting = [(value, 1)]
    while waiting:
        part, depth = waiting.pop()
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


def _too_deep(name: str) -> UserError:
    return UserError(f"{name} is nested more than {DEEPEST} levels deep.")
