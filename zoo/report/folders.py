"""What lies in the folders that are reported on: runs, evaluations, sweeps."""

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernels import UserError
from zoo.files.safe_yaml import read_yaml
from zoo.train.metrics_file import read_metrics
from zoo.train.results import read_row

Plain = dict[str, Any]
NAMED = 3  # folders in a sentence about what they lack
SAMPLE = "── sample after "  # how each sample in samples.txt begins


@dataclass(frozen=True)
class Run:
    """A run; parts that its folder lacks are empty.

    Attributes:
        name: The shortest name that no other run has.
        folder: Its folder.
        row: Its results.
        config: Its config, dotted keys to values.
        metrics: Its logged steps.
        samples: The text that it wrote last.
    """

    name: str
    folder: Path
    row: Plain
    config: Plain
    metrics: list[Plain]
    samples: str


@dataclass
class Found:
    """Everything in the folders.

    Attributes:
        runs: Runs, those of sweeps among them.
        evaluations: Folder → records of its rows.jsonl.
        sweeps: Folder → rows of its sweep.csv.
        lacking: What is not there → the folders without it.
    """

    runs: list[Run] = field(default_factory=list)
    evaluations: dict[Path, list[Plain]] = field(default_factory=dict)
    sweeps: dict[Path, list[Plain]] = field(default_factory=dict)
    lacking: dict[str, list[str]] = field(default_factory=dict)

    def lacks(self, folder: Path, what: str) -> None:
        """Note what a folder lacks, as the rest of a sentence."""
        self.lacking.setdefault(what, []).append(str(folder))

    @property
    def missing(self) -> list[str]:
        """A sentence for each thing that is not there."""
        sentences = []
        for what, folders in self.lacking.items():
            more = f" and {len(folders) - NAMED} more" if len(folders) > NAMED else ""
            sentences.append(f"{', '.join(folders[:NAMED])}{more}: {what}.")
        return sentences


def read_folders(folders: Iterable[str | Path]) -> Found:
    """Read folders.

    Raises:
        UserError: A folder does not exist, or holds no run, evaluation or sweep.
    """
    found, runs = Found(), dict[Path, None]()
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"folders: {folder} is no folder; name those of runs, evaluations or sweeps")
        inside = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
        is_run, is_evaluation = _is_run(folder), (folder / "rows.jsonl").is_file()
        if not (inside or is_run or is_evaluation):
            raise UserError(f"folders: {folder} holds no run (config.yaml), evaluation (rows.jsonl) or sweep (runs)")
        runs |= dict.fromkeys([folder] if is_run else inside)
        if is_evaluation:
            found.evaluations[folder] = _records(folder, found)
        if inside and (folder / "sweep.csv").is_file():
            with open(folder / "sweep.csv", newline="", encoding="utf-8") as file:
                found.sweeps[folder] = list(csv.DictReader(file))
        elif inside and not (folder / "comparison.json").is_file():
            found.lacks(folder, "no sweep.csv, which a sweep writes when it ends")
    names = _names([*runs])
    found.runs = [_run(folder, name, found) for folder, name in zip(runs, names, strict=True)]
    return found


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file() or (folder / "config.yaml").is_file()


def _names(folders: list[Path]) -> list[str]:
    """The last parts of paths, as few as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _run(folder: Path, name: str, found: Found) -> Run:
    row, metrics, config, samples = dict[str, Any](), list[Plain](), dict[str, Any](), ""
    try:
        results = read_row(folder)
        if results is None:
            found.lacks(folder, "no results.json, as of a run that has not ended, so no sizes and losses in the table")
        else:
            row = results
    except UserError:
        found.lacks(folder, "results.json is damaged, so there are no sizes and losses in the table")
    if (folder / "metrics.jsonl").is_file():
        metrics = read_metrics(folder / "metrics.jsonl")
    if not metrics:
        found.lacks(folder, "no metrics.jsonl with a logged step, so no curve")
    try:
        config = dict(flat(read_yaml(folder / "config.yaml")))
    except UserError:
        found.lacks(folder, "no config.yaml that can be read, so no comparison with others")
    if (folder / "samples.txt").is_file():
        samples = _last((folder / "samples.txt").read_text(encoding="utf-8", errors="replace"))
    writes = (folder / "tokenizer.json").is_file() and config.get("samples.prompts") != []  # text, and was to show some
    if writes and not samples:
        found.lacks(folder, "no samples.txt with a sample")
    return Run(name, folder, row, config, metrics, samples)


def flat(value: Any, key: str = "") -> Iterable[tuple[str, Any]]:
    """A nested config as dotted keys, without the `init_args` that every component has."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            inside = key if name == "init_args" else f"{key}.{name}".strip(".")
            yield from flat(inner, inside)
    else:
        yield key.removesuffix(".class_path"), value


def _last(samples: str) -> str:
    """The samples of the last step that has any."""
    pieces = samples.split(SAMPLE)[1:]
    steps = [piece.partition(" ")[0] for piece in pieces]
    return "".join(SAMPLE + piece for piece, step in zip(pieces, steps, strict=True) if step == steps[-1]).strip()


def _records(folder: Path, found: Found) -> list[Plain]:
    records, damaged = [], 0
    for line in (folder / "rows.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            if isinstance(record["rows"], list) and record["what"]["task"] and record["checkpoint"]:
                records.append(record)
        except (ValueError, KeyError, TypeError):
            damaged += 1
    if damaged:
        found.lacks(folder, f"{damaged} of the lines in rows.jsonl are damaged and left out")
    if not records:
        found.lacks(folder, "no results in rows.jsonl")
    return records
