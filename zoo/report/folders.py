"""Runs, evaluations and sweeps in the folders of a report."""

import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kernels import UserError
from zoo.display import short_list
from zoo.files.links import read_regular
from zoo.report.checks import (
    Plain,
    parse_config,
    parse_picture,
    parse_record,
    parse_results,
    parse_samples,
    parse_sweep,
)
from zoo.train.metrics_file import line_list, parse_metrics

NAMED = 3  # folders in a sentence about what they lack
# largest files that are read
MAX_BYTES = {"metrics.jsonl": 1 << 30, "rows.jsonl": 1 << 26, "samples.txt": 1 << 26, "sweep.png": 300_000}
MAX_OTHER = 1 << 22  # largest of the others
MAX_SAMPLES = 300_000  # characters of a run's last samples
T = TypeVar("T")
SAMPLE = "── sample after "  # how each sample in samples.txt begins


@dataclass(frozen=True)
class Run:
    """A run; parts that its folder lacks are empty.

    Attributes:
        name: The shortest name that no other run has.
        folder: Its folder.
        row: Its results.
        config: Its config, dotted keys to values.
        config_text: Its config as YAML.
        metrics: Its logged steps.
        samples: The text that it wrote last.
    """

    name: str
    folder: Path
    row: Plain
    config: Plain
    config_text: str
    metrics: list[Plain]
    samples: str


@dataclass
class Contents:
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
        return [_printable(f"{short_list(names, NAMED, ', ')}: {what}.") for what, names in self.lacking.items()]


def read_folders(folders: Iterable[str | Path]) -> Contents:
    """Read folders.

    Raises:
        UserError: A folder does not exist, or holds no run, evaluation or sweep.
    """
    contents, runs = Contents(), dict[Path, None]()
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"folders: {folder} is not a folder; name those of runs, evaluations or sweeps")
        inside = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
        for link in filter(Path.is_symlink, inside):
            contents.lacks(link, "a link, which is not followed")
        inside = [run for run in inside if not run.is_symlink()]
        is_run, is_evaluation = _is_run(folder), (folder / "rows.jsonl").is_file()
        if not (inside or is_run or is_evaluation):
            raise UserError(f"folders: {folder} holds no run (config.yaml), evaluation (rows.jsonl) or sweep (runs)")
        runs |= dict.fromkeys([folder] if is_run else inside)
        if is_evaluation:
            contents.evaluations[folder] = _records(folder, contents)
        if inside and (folder / "sweep.csv").is_file():
            rows, bad = _parsed(folder, "sweep.csv", parse_sweep, contents) or ([], [])
            contents.sweeps[folder] = rows
            if bad:
                contents.lacks(folder, f"sweep.csv has damaged lines, which are left out: {line_list(bad)}")
        elif inside and not (folder / "comparison.json").is_file():
            contents.lacks(folder, "no sweep.csv, which a sweep writes when it ends")
    names = _names([*runs])
    contents.runs = [_run(folder, name, contents) for folder, name in zip(runs, names, strict=True)]
    return contents


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


def _run(folder: Path, name: str, contents: Contents) -> Run:
    row, metrics, config, config_text = dict[str, Any](), list[Plain](), dict[str, Any](), ""
    logged: list[Plain] | None = []
    if not os.path.lexists(folder / "results.json"):
        contents.lacks(folder, "no results.json, so no sizes and losses in the table; the run has not ended")
    elif (parsed_row := _parsed(folder, "results.json", parse_results, contents)) is not None:
        row = parsed_row
    if not (folder / "config.yaml").is_file():
        contents.lacks(folder, "no config.yaml that can be read, so no comparison with others")
    elif (parsed := _parsed(folder, "config.yaml", parse_config, contents)) is not None:
        config, config_text = dict(flat(parsed[0])), parsed[1]
    if (folder / "metrics.jsonl").is_file():
        logged = _parsed(folder, "metrics.jsonl", partial(_metrics, folder, contents), contents)
        metrics = logged or []
    if logged == []:
        contents.lacks(folder, "no metrics.jsonl with a logged step, so no curve")
    writes = (folder / "tokenizer.json").is_file() and config.get("samples.prompts") != []  # text, and was to show some
    text = _parsed(folder, "samples.txt", parse_samples, contents) if (folder / "samples.txt").is_file() else ""
    samples = _last(text or "")
    if text is not None and writes and not samples:
        contents.lacks(folder, "no samples.txt with a sample")
    if len(samples) > MAX_SAMPLES:
        contents.lacks(
            folder, f"samples.txt has more than {MAX_SAMPLES:,} characters of the last step; more are left out"
        )
        samples = samples[:MAX_SAMPLES]
    return Run(name, folder, row, config, config_text, metrics, samples)


def _parsed(folder: Path, name: str, parse: Callable[[bytes], T], contents: Contents) -> T | None:
    """A file's content; None, and a note, if it is damaged or is not a regular file inside the folder."""
    try:
        data = read_regular(folder / name, MAX_BYTES.get(name, MAX_OTHER))
    except UserError as error:
        reason = str(error).removeprefix(f"{folder / name} ").rstrip(".")
        contents.lacks(folder, f"{name} {reason}, so it is not in this page")
        return None
    try:
        return parse(data)
    except UserError as error:
        contents.lacks(folder, str(error).rstrip("."))
        return None


def sweep_picture(folder: Path, contents: Contents) -> str | None:
    """The picture that a sweep has drawn, as a data URL; None, and a note, without one."""
    if not (folder / "sweep.png").is_file():
        contents.lacks(folder, "no sweep.png")
        return None
    return _parsed(folder, "sweep.png", parse_picture, contents)


def _metrics(folder: Path, contents: Contents, data: bytes) -> list[Plain]:
    rows, bad = parse_metrics(io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="replace"))
    if bad:
        contents.lacks(folder, f"metrics.jsonl has damaged lines, which are left out: {line_list(bad)}")
    return rows


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


def _records(folder: Path, contents: Contents) -> list[Plain]:
    records = _parsed(folder, "rows.jsonl", partial(_parse_records, folder, contents), contents)
    if records == []:
        contents.lacks(folder, "no results in rows.jsonl")
    return _newest(folder, contents, records or [])


def _newest(folder: Path, contents: Contents, records: list[Plain]) -> list[Plain]:
    """Drop the records of a task of which there are some of a later version."""
    newest: dict[str, float] = {}
    for what in (record["what"] for record in records):
        newest[what["task"]] = max(newest.get(what["task"], 1), what.get("version", 1))
    for task in sorted({r["what"]["task"] for r in records if r["what"].get("version", 1) < newest[r["what"]["task"]]}):
        contents.lacks(folder, f"rows.jsonl has rows of an earlier version of {task}, which are left out")
    return [record for record in records if record["what"].get("version", 1) == newest[record["what"]["task"]]]


def _parse_records(folder: Path, contents: Contents, data: bytes) -> list[Plain]:
    records, bad = [], []
    for number, line in enumerate(data.decode(errors="replace").split("\n"), start=1):
        try:
            if line.strip():
                records.append(parse_record(line))
        except (ValueError, RecursionError):
            bad.append(number)
    if bad:
        contents.lacks(folder, f"rows.jsonl has damaged lines, which are left out: {line_list(bad)}")
    return records


def _printable(text: str) -> str:
    """A sentence for the terminal, to which names of files may contain commands."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
