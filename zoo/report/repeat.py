"""What repeats the numbers of a report: commands, versions, devices."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zoo.files.safe_yaml import dump_yaml, read_yaml
from zoo.report.folders import Plain, Run

VERSIONS = ("commit", "zoo", "torch", "triton", "python", "device", "devices", "precision", "seed")


class Recipe(NamedTuple):
    """How to repeat a run or an evaluation.

    Attributes:
        name: Of what.
        command: The command.
        versions: What it ran with.
        config: The whole config of a run; empty for an evaluation.
    """

    name: str
    command: str
    versions: str
    config: str = ""


def of_run(run: Run, with_config: bool = True) -> Recipe:
    """Train it again from its config."""
    command = [
        "python",
        "cli.py",
        "fit",
        "--config",
        str(run.folder / "config.yaml"),
        "--run",
        f"{run.folder.name}-again",
    ]
    file = run.folder / "config.yaml"
    config = dump_yaml(read_yaml(file)) if run.config and with_config else ""
    return Recipe(run.name, shlex.join(command), _versions(run.row), config)


def of_evaluation(folder: Path, records: Sequence[Plain]) -> list[Recipe]:
    """Evaluate again: a command for each set of options."""
    commands: dict[str, Plain] = {}
    for record in records:
        what = record["what"]
        options = {name: value for name, value in (what.get("options") or {}).items() if value is not None}
        arguments = [f"--checkpoint={record['checkpoint']}", f"--tasks={what['task']}"]
        arguments += [f"--{name}={value}".replace(" ", "") for name, value in options.items()]
        command = shlex.join(["python", "cli.py", "evaluate", *arguments, f"--output={folder}-again"])
        commands.setdefault(command, {**record, "precision": what.get("precision")})
    return [Recipe(str(folder), command, _versions(record)) for command, record in commands.items()]


def _versions(row: Plain) -> str:
    return ", ".join(f"{name} {row[name]}" for name in VERSIONS if row.get(name) is not None)
