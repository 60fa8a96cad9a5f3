"""`history.jsonl`: a line for each setting that was changed when a run was resumed."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernels.errors import UserError
from zoo.files.atomic import atomic_write
from zoo.files.links import check_in_place

HISTORY = "history.jsonl"


class Change(NamedTuple):
    """One changed setting.

    Attributes:
        step: Optimiser steps before the change.
        tokens: Tokens before the change.
        key: The key in the config.
        old: The value until then; `from` in the file.
        new: The value from then on; `to` in the file.
    """

    step: int
    tokens: int
    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old} → {self.new}"


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys at which two plain configs differ, with the old and the new value. A missing key equals null."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


def read_history(run: Path) -> list[Change]:
    """Return the changes of a run, the oldest first; none where the file is missing.

    Raises:
        UserError: A line is damaged.
    """
    file, changes = run / HISTORY, list[Change]()
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            each = json.loads(line)
            change = Change(each["step"], each["tokens"], each["key"], each["from"], each["to"])
        except (ValueError, TypeError, KeyError, RecursionError):
            change = None
        if change is None or [type(part) for part in change[:3]] != [int, int, str]:
            raise UserError(f"{file}: line {number} is not a change of a run; repair the file, or delete it")
        changes.append(change)
    return changes


def record(run: Path, step: int, changes: Sequence[Change]) -> None:
    """Add the changes with which a run is resumed at a step to its file.

    Changes at this step or later are of a continuation that has left no checkpoint, or is abandoned; they are removed.

    Raises:
        UserError: The file is damaged, or leads out of the run's folder.
    """
    check_in_place(run / HISTORY)
    before = read_history(run)
    after = [each for each in before if each.step < step] + list(changes)
    if after != before:
        with atomic_write(run / HISTORY) as file:
            for each in after:
                line = {"step": each.step, "tokens": each.tokens, "key": each.key, "from": each.old, "to": each.new}
                file.write(json.dumps(line).encode() + b"\n")
