"""Which runs a scaling law is fitted to, and why others are left out."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kernels import UserError
from zoo.scaling.curves import Curve
from zoo.train.metrics_file import read_metrics
from zoo.train.results import read_row

# what a row needs beside the curve; rows of earlier versions have none of these
NEEDED = (
    "mixers",
    "parameters_without_embeddings",
    "training_flops_per_token",
    "schedule",
    "warmup_steps",
    "data_hash",
    "context_length",
)
LEAST_POINTS = 8
DIVERGED = 0.5  # nats above the run's lowest loss
WIDTH = 0.05  # of the smoothing of training losses, as a fraction of the tokens


class Trained(NamedTuple):
    """A run that a law can be fitted to."""

    folder: Path
    row: dict[str, Any]
    curve: Curve


class Selection(NamedTuple):
    """The runs of a law, and the reason why each of the others is left out."""

    runs: list[Trained]
    left_out: dict[str, str]


def find_runs(places: Iterable[str | Path]) -> list[Path]:
    """The folders of runs: the places themselves, or the runs in them.

    Raises:
        UserError: A place does not exist, or holds no runs.
    """
    found: list[Path] = []
    for place in map(Path, places):
        if not place.is_dir():
            raise UserError(f"runs: there is no folder {place}")
        inside = (
            [place] if (place / "metrics.jsonl").is_file() else sorted(f.parent for f in place.glob("*/metrics.jsonl"))
        )
        if not inside:
            raise UserError(f"runs: {place} is no run and holds none (a run has a metrics.jsonl)")
        found += [folder for folder in inside if folder not in found]
    return found


def select(folders: Sequence[Path]) -> Selection:
    """Read runs, and leave out by rule what does not belong to one law.

    Raises:
        UserError: No run is left.
    """
    left_out: dict[str, str] = {}
    runs: list[Trained] = []
    for folder in folders:
        found = _read(folder)
        if isinstance(found, str):
            left_out[folder.name] = found
        else:
            runs.append(found)
    for name, reason in itertools.chain(_of_other_data(runs), _repeated(runs)):
        left_out.setdefault(name, reason)
    runs = [run for run in runs if run.folder.name not in left_out]
    if not runs:
        listed = "; ".join(f"{name}: {reason}" for name, reason in itertools.islice(left_out.items(), 3))
        raise UserError(f"runs: none of {len(folders)} can be used ({listed})")
    return Selection(runs, left_out)


def _read(folder: Path) -> Trained | str:
    """A run, or why it cannot be used."""
    try:
        row = read_row(folder)
    except UserError as error:
        return str(error)
    if row is None:
        return "it has no results.json, so it has not ended"
    if row["status"] != "complete":
        return f"its status is {row['status']}"
    if missing := [name for name in NEEDED if row.get(name) is None]:
        return f"its results.json has no {missing[0]}; it is of an earlier version, or not a run on tokens"
    if row["schedule"] == "cosine":
        return "its learning rate falls all the time (schedule: cosine), so its losses on the way are not those of shorter runs"
    points = [
        (metrics["tokens"], metrics["train_loss"])
        for metrics in read_metrics(folder / "metrics.jsonl")
        if metrics.get("train_loss") is not None
        and metrics.get("tokens") is not None
        and row["warmup_steps"] <= metrics["step"] < row["decay_starts"]
    ]
    if len(points) < LEAST_POINTS:
        return f"it has {len(points)} training losses after its warm-up and before its decay, fewer than {LEAST_POINTS}"
    tokens, losses = np.array(points, np.float64).T
    curve = Curve(
        folder.name,
        row["mixers"],
        row["parameters_without_embeddings"],
        row["training_flops_per_token"],
        tokens,
        losses,
    ).smoothed(WIDTH)
    if not np.isfinite(losses).all() or curve.losses[-1] > curve.losses.min() + DIVERGED:
        return f"it has diverged: its loss ends at {curve.losses[-1]:.2f} and had been {curve.losses.min():.2f}"
    return Trained(folder, row, curve)


def _of_other_data(runs: Sequence[Trained]) -> Iterable[tuple[str, str]]:
    """Runs on other data, or other lengths of it, than most."""
    for name, what in (("data_hash", "other data"), ("context_length", "sequences of another length")):
        counts = Counter(run.row[name] for run in runs)
        if len(counts) > 1:
            most, count = counts.most_common(1)[0]
            for run in runs:
                if run.row[name] != most:
                    yield run.folder.name, f"it was trained on {what} ({run.row[name]}) than {count} others ({most})"


def _repeated(runs: Sequence[Trained]) -> Iterable[tuple[str, str]]:
    """All but the best of the runs that differ in nothing but their learning rate, and copies of a run."""
    groups: dict[tuple[Any, ...], list[Trained]] = {}
    for run in runs:
        groups.setdefault((run.curve.mixer, run.curve.size, run.row.get("seed")), []).append(run)
    for group in groups.values():
        group.sort(key=lambda run: run.curve.losses[-1])
        best, *others = group
        for other in others:
            same = other.row["learning_rate"] == best.row["learning_rate"]
            yield (
                other.folder.name,
                f"it repeats {best.folder.name}: the same mixer, size, seed and learning rate"
                if same
                else f"{best.folder.name}, with the learning rate {best.row['learning_rate']:g}, ends with a lower loss",
            )
