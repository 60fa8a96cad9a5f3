"""Plain containers from YAML and from checkpoints: whatever the file says, they are of a size and a depth to work with.

A few lines of YAML whose aliases name each other stand for millions of nodes, and brackets in brackets for a recursion
without end. Both are seen in the parser's events, before anything is built of them.
"""

import os
from pathlib import Path
from typing import Any

import yaml

from kernels.errors import UserError

MOST_NODES = 100_000  # with each alias counted as what it stands for; the largest config of ours has a few hundred
DEEPEST = 100
_OPENING = (yaml.MappingStartEvent, yaml.SequenceStartEvent)
_CLOSING = (yaml.MappingEndEvent, yaml.SequenceEndEvent)


def read_yaml(path: str | os.PathLike[str], name: str = "config") -> Any:
    """What a YAML file holds, as plain containers.

    Args:
        path: The file.
        name: What messages begin with.

    Raises:
        UserError: It cannot be read, is no YAML, or is too large or too deep.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise UserError(f"{name}: {path} cannot be read as text: {error}") from None
    return parse_yaml(text, f"{name}: {path}")


def parse_yaml(text: str, name: str) -> Any:
    """As `read_yaml`, of a text; messages begin with `name`."""
    try:
        _check_events(text, name)
        return yaml.safe_load(text)
    # besides YAML's own errors: what a date or a number that is none raises, and keys that cannot be keys
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{name} is not YAML: {' '.join(str(error).split())}") from None


def check_plain(value: Any, name: str) -> None:
    """Raise a UserError, which begins with `name`, unless a value is plain containers of at most that size and depth.

    Shared parts count each time; so does a part that holds itself, which therefore ends as too deep.
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
            if odd := next((key for key in part if not isinstance(key, str | int | float | None)), None):
                raise UserError(f"{name} has a key {odd!r:.40}, which is no text.")
            waiting += [(each, depth + 1) for each in part.values()]
        elif isinstance(part, list | tuple):
            waiting += [(each, depth + 1) for each in part]
        elif not isinstance(part, str | int | float | None):
            raise UserError(f"{name} holds a {type(part).__name__}, which is no part of a config.")


def _check_events(text: str, name: str) -> None:
    """Count the nodes as if each alias were written out."""
    sizes: dict[str, int] = {}  # anchor → nodes
    opened: list[tuple[str | None, int]] = []  # anchor, and nodes before it
    nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, _CLOSING):
            anchor, before = opened.pop()
            if anchor is not None:
                sizes[anchor] = nodes - before
            continue
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise UserError(f"{name}: *{event.anchor} stands inside of what it names.")
            nodes += sizes.get(event.anchor, 1)  # an unknown one is the parser's to report
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
    return UserError(f"{name} stands for more than {MOST_NODES:,} values, with each alias written out.")


def _too_deep(name: str) -> UserError:
    return UserError(f"{name} is nested more than {DEEPEST} levels deep.")
