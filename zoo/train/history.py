"""`history.jsonl`: the settings that were changed when a run was resumed, a line for each, with its step."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from zoo.files.links import check_in_place

HISTORY = "history.jsonl"


class Change(NamedTuple):
    """One changed setting.

    Attributes:
        step: Optimiser steps before the change.
        tokens: Tokens before the change.
        key: The key in the config.
        old: Its value before; `from` in the file.
        new: Its value since; `to` in the file.
    """

    step: int
    tokens: int
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old} → {self.new}"


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The keys at which two plain configs differ, each with the old and the new value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


def read_history(run: Path) -> list[Change]:
    """Return the changes of a run, the oldest first; none where the file is missing."""
    file = run / HISTORY
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    records = [json.loads(line) for line in lines]
    return [Change(each["step"], each["tokens"], each["key"], each["from"], each["to"]) for each in records]


def record(run: Path, changes: list[Change]) -> None:
    """Add changes to the file of a run, unless they are its last lines already, as after a failed start."""
    check_in_place(run / HISTORY)
    if not changes or read_history(run)[-len(changes) :] == changes:
        return
    with (run / HISTORY).open("a", encoding="utf-8") as file:
        for each in changes:
            line = {"step": each.step, "tokens": each.tokens, "key": each.key, "from": each.old, "to": each.new}
            file.write(json.dumps(line) + "\n")
