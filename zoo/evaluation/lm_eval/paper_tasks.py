"""The tasks of lm-eval that the papers use: what they measure, and which public data set their files hold.

Every other task of lm-eval can be named as well; these are listed, and found without reading lm-eval's 14,000 configs.
"""

import csv
from pathlib import Path
from typing import NamedTuple


class Listed(NamedTuple):
    """A task that a paper uses, a row of `paper_tasks.csv`.

    Attributes:
        measures: What it measures, in one phrase.
        source: The public data set and its split; "" if the task generates its data.
        folder: The folder of lm-eval's tasks that defines it.
        file: The data's file or folder, without its suffix; None if it is called like the task.
    """

    measures: str
    source: str
    folder: str
    file: str | None = None


_GROUPS: dict[str, dict[str, Listed]] = {}
with Path(__file__).with_name("paper_tasks.csv").open(encoding="utf-8", newline="") as _file:
    for _group, _name, _measures, _source, _folder, _data in list(csv.reader(_file))[1:]:
        _GROUPS.setdefault(_group, {})[_name] = Listed(_measures, _source, _folder, _data or None)
RULER, BABILONG = _GROUPS["ruler"], _GROUPS["babilong"]
PAPER_TASKS = {name: task for group in _GROUPS.values() for name, task in group.items()}


def is_ruler(name: str) -> bool:
    """Return whether a task of lm-eval belongs to RULER, which generates prompts of a length."""
    return name in RULER or name.startswith("ruler_")
