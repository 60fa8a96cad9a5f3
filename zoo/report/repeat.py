"""Commands, versions and devices that repeat the numbers of a report."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zoo.report.checks import Plain
from zoo.report.folders import Run
from zoo.train.metrics_file import is_number

VERSIONS = ("commit", "zoo", "torch", "triton", "python", "device", "devices", "precision", "seed")


class Recipe(NamedTuple):
    """The command that repeats a run or an evaluation, what it ran with, and the whole config of a run."""

    name: str
    command: str
    versions: str
    config: str = ""


def of_run(run: Run, with_config: bool = True) -> Recipe:
    """Train it again from its config."""
    config, repeated = portable(run.folder / "config.yaml"), f"{run.folder.name}-again"
    command = ["python", "cli.py", "fit", "--config", config, "--run", repeated]
    text = run.config_text if with_config else ""
    text = re.sub(r"(?<=: )(/[^\s'\"]+)+", lambda match: portable(match[0]), text)
    return Recipe(run.name, shlex.join(command), _versions(run.row), text)


def of_evaluation(folder: Path, records: Sequence[Plain]) -> list[Recipe]:
    """Evaluate again: a command for each task and set of options, with all models and cells that it was run for."""
    grouped: dict[str, list[Plain]] = {}
    for record in records:
        what = record["what"]
        grouped.setdefault(json.dumps([what["task"], what.get("options"), what.get("precision")]), []).append(record)
    recipes = []
    for group in grouped.values():
        what = group[0]["what"]
        options = {name: value for name, value in (what.get("options") or {}).items() if value is not None}
        for option, name in {"lengths": "length", "depths": "depth"}.items():
            cells = [each["what"].get("cell") or {} for each in group]
            if values := sorted({cell[name] for cell in cells if is_number(cell.get(name))}):
                options[option] = values
        if what.get("precision"):
            options["precision"] = what["precision"]
        models = dict.fromkeys(each["checkpoint"] for each in group)
        checkpoints = [f"--checkpoint={portable(path)}" for path in models]
        arguments = [
            f"--{name}={json.dumps(value) if isinstance(value, list) else value}" for name, value in options.items()
        ]
        command = ["python", "cli.py", "evaluate", *checkpoints, f"--tasks={what['task']}", *arguments]
        name = portable(folder)
        recipes.append(Recipe(name, shlex.join([*command, f"--output={name}-again"]), _versions(group[0])))
    return recipes


def portable(path: str | Path) -> str:
    """A path relative to the working folder, or its last three parts, which say nothing about this machine."""
    path = Path(path)
    if not path.is_absolute():
        return str(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[1:][-3:]))


def _versions(row: Plain) -> str:
    return ", ".join(f"{name} {row[name]}" for name in VERSIONS if row.get(name) is not None)
