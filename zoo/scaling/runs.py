"""Selection of the runs that a scaling law is fitted to, with the reason for each run left out.

A table, in a CSV with one row for each run, has those of other code bases, or of a study that is published.
"""

import csv
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kernels import UserError
from zoo.files.safe_yaml import read_yaml
from zoo.files.sealed_json import read_sealed
from zoo.scaling.curves import Curve
from zoo.train.metrics_file import read_metrics
from zoo.train.results import read_row

# what a row needs in addition to the curve
NEEDED = (
    "mixers",
    "parameters_without_embeddings",
    "training_flops_per_token",
    "learning_rate",
    "schedule",
    "warmup_steps",
    "decay_starts",
    "data_hash",
    "context_length",
)
LEAST_POINTS = 8
DIVERGED = 0.5  # nats above the run's lowest loss
# keys of `model` in which runs of one law may differ
SIZES = ("hidden_size", "num_layers", "num_heads", "intermediate_size", "nominal_size")
WIDTH = 0.05  # of the smoothing of training losses, as a fraction of the tokens


class Trained(NamedTuple):
    """A run that a law can be fitted to.

    Attributes:
        name: Its folder, or its file and its name there.
        row: Its results.
        curve: Its losses.
        kind: Its config's `model` without the sizes, as text; None for a run in a table.
    """

    name: str
    row: dict[str, Any]
    curve: Curve
    kind: str | None


class Selection(NamedTuple):
    """The runs of a law.

    Attributes:
        runs: Those that it is fitted to.
        left_out: Why each of the others is not.
        rates: All learning rates that were tried with a mixer and size.
    """

    runs: list[Trained]
    left_out: dict[str, str]
    rates: dict[tuple[str, float], set[float]]


def find_runs(places: Iterable[str | Path]) -> list[Path]:
    """Return the folders of runs, which are the places or are in them, and the places that are tables of runs.

    Raises:
        UserError: A place does not exist, or holds no runs.
    """
    runs: list[Path] = []
    for place in map(Path, places):
        if place.is_file() and place.suffix != ".csv":
            raise UserError(f"runs: {place} is neither a folder nor a table of runs, which ends in .csv")
        if not place.exists():
            raise UserError(f"runs: there is no folder {place}")
        inside = sorted(run.parent for run in place.glob("*/metrics.jsonl"))
        if place.is_file() or (place / "metrics.jsonl").is_file():
            inside = [place]
        if not inside:
            raise UserError(f"runs: {place} is not a run and holds none (a run has a metrics.jsonl)")
        runs += [run for run in inside if run not in runs]
    return runs


def untrained(places: Iterable[str | Path]) -> dict[str, str]:
    """The runs that sweeps have planned in these folders and not begun, each with the reason why it is left out."""
    planned: list[Path] = []
    for place in map(Path, places):
        if (place / "runs.json").is_file():
            advice = "delete it, and runs that have not been begun are not named"
            planned += [place / name for name in read_sealed(place / "runs.json", advice=advice)]
    return {str(run): "its sweep has not begun it" for run in planned if not (run / "metrics.jsonl").is_file()}


def select(places: Sequence[Path], untrained: Mapping[str, str], single_losses: bool = False) -> Selection:
    """Read runs, and leave out by rule what does not belong to one law.

    Args:
        places: Folders of runs, and tables of runs.
        untrained: Other runs, with the reason why they are left out.
        single_losses: Whether a run in a table may have a single loss instead of a curve.

    Raises:
        UserError: A table is damaged, or no run is left.
    """
    left_out = dict(untrained)
    runs: list[Trained] = []
    for place in places:
        for name, trained in _read_table(place, single_losses) if place.is_file() else [(str(place), _read(place))]:
            if isinstance(trained, str):
                left_out[name] = trained
            else:
                runs.append(trained)
    count = len(runs) + len(left_out) - len(untrained)
    rates: dict[tuple[str, float], set[float]] = {}
    # one rule after the other, so that what one of them leaves out does not count in the next
    rules: tuple[Callable[[Sequence[Trained]], Iterable[tuple[str, str]]], ...] = (
        partial(_minority, name="context_length", what="sequences of another length"),
        partial(_minority, name="data_hash", what="other data"),
        _repeated,
    )
    for rule in rules:
        rates = {}  # at last, of the runs that none but the rule about repetitions has left out
        for run in runs:
            rates.setdefault((run.curve.mixer, run.curve.size), set()).add(run.row["learning_rate"])
        named = dict(rule(runs))
        left_out |= named
        runs = [run for run in runs if run.name not in named]
    if not runs:
        listed = "; ".join(f"{name}: {reason}" for name, reason in itertools.islice(left_out.items(), 3))
        raise UserError(f"runs: none of {count} can be used ({listed})")
    return Selection(runs, left_out, rates)


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
        return f"its results.json has no {missing[0]}; it is not a run on tokens"
    if row["schedule"] == "custom":
        return "its schedule is a class (optim.schedule), which does not say where its learning rate falls"
    if row["schedule"] in ("cosine", "inverse_sqrt"):
        falling = f"its learning rate falls all the time (schedule: {row['schedule']})"
        return f"{falling}, so its losses are not those of shorter runs"
    inside = [
        metrics
        for metrics in read_metrics(folder / "metrics.jsonl")
        if "train_loss" in metrics and row["warmup_steps"] <= metrics["step"] < row["decay_starts"]
    ]
    if bad := [metrics["step"] for metrics in inside if metrics["train_loss"] is None]:
        return f"it has diverged: its loss at step {bad[0]} is not a number"
    points = [(metrics["tokens"], metrics["train_loss"]) for metrics in inside if metrics.get("tokens")]
    if len(points) < LEAST_POINTS:
        return f"it has {len(points)} training losses after its warm-up and before its decay, fewer than {LEAST_POINTS}"
    tokens, losses = np.array(points, np.float64).T
    size, flops = row["parameters_without_embeddings"], row["training_flops_per_token"]
    curve = Curve(str(folder), row["mixers"], size, flops, tokens, losses).smoothed(WIDTH)
    return _diverged(curve) or Trained(str(folder), row, curve, _kind(folder))


def _read_table(file: Path, single_losses: bool) -> Iterable[tuple[str, Trained | str]]:
    """Yield each run of a table, or why it cannot be used, with its name."""
    for row, curve in read_run_table(file):
        count = len(curve.losses)
        if np.isnan(curve.losses).any():
            at = curve.tokens[np.isnan(curve.losses)][0]
            yield curve.run, f"it has diverged: its loss at {at:.3g} tokens is not a number"
        elif count < LEAST_POINTS and not (single_losses and count == 1):
            losses = f"{count} training loss{'es' * (count > 1)}"
            yield curve.run, f"it has {losses}, fewer than {LEAST_POINTS}; method=parametric can also use a single one"
        else:
            smooth = curve.smoothed(WIDTH)
            yield curve.run, _diverged(smooth) or Trained(curve.run, row, smooth, None)


def _diverged(curve: Curve) -> str | None:
    """Describe how the loss of a run rose; None if it did not."""
    if curve.losses[-1] <= curve.losses.min() + DIVERGED:
        return None
    return f"it has diverged: its loss ends at {curve.losses[-1]:.2f} and had been {curve.losses.min():.2f}"


def _kind(folder: Path) -> str:
    """Return the model config without its sizes, as text; nothing if it cannot be read."""
    try:
        config = read_yaml(folder / "config.yaml")
    except UserError:
        return ""
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        return ""
    return json.dumps({key: value for key, value in model.items() if key not in SIZES}, sort_keys=True, default=str)


def mixed_kinds(runs: Iterable[Trained]) -> list[str]:
    """A sentence for each mixer whose runs are of models that differ in more than their size."""
    kinds: dict[str, dict[str, str]] = {}  # mixer → kind → its first run
    for run in runs:
        if run.kind is not None:
            kinds.setdefault(run.curve.mixer, {}).setdefault(run.kind, run.name)
    return [
        f"{mixer}: models that differ in more than their size are in one law, such as {' and '.join(first)}; "
        "fit their runs apart"
        for mixer, first_runs in kinds.items()
        if len(first := [*first_runs.values()][:2]) > 1
    ]


def one_rate(selection: Selection) -> list[str]:
    """Sentences that name the mixers of whose smallest or largest size one learning rate alone was tried."""
    alone: dict[str, list[str]] = {}  # at which sizes → mixers
    for mixer in dict.fromkeys(mixer for mixer, _ in selection.rates):
        mixer_sizes = sorted(size for of, size in selection.rates if of == mixer)
        ends = {"smallest": mixer_sizes[0], "largest": mixer_sizes[-1]}
        if at := [name for name, size in ends.items() if len(selection.rates[mixer, size]) == 1]:
            alone.setdefault(" and the ".join(at), []).append(mixer)
    return [
        f"{', '.join(mixers)}: one learning rate alone was tried at the {at} size, so a law may be that of rates (a "
        "ladder's check_learning_rate.yaml tries others)"
        for at, mixers in alone.items()
    ]


def _minority(runs: Sequence[Trained], name: str, what: str) -> Iterable[tuple[str, str]]:
    """Runs whose rows have another value than most."""
    stated = [run for run in runs if run.row[name] is not None]
    for most, count in Counter(run.row[name] for run in stated).most_common(1):
        for run in stated:
            if run.row[name] != most:
                yield run.name, f"it was trained on {what} ({run.row[name]}) than {count} others ({most})"


def _repeated(runs: Sequence[Trained]) -> Iterable[tuple[str, str]]:
    """Yield each repeated run and the reason to leave it out: all but the longest at the best rate.

    Runs with a single loss do not repeat each other: they are points of a grid over sizes and tokens.
    """
    groups: dict[tuple[Any, ...], list[Trained]] = {}
    for run in (run for run in runs if len(run.curve.losses) > 1):
        groups.setdefault((run.curve.mixer, run.kind, run.curve.size, run.row.get("seed")), []).append(run)
    for group in groups.values():
        common = min(run.curve.flops[-1] for run in group)
        at_common = [np.nan_to_num(run.curve.at(common), nan=np.inf) for run in group]
        rate = group[int(np.argmin(at_common))].row["learning_rate"]
        best = max((run for run in group if run.row["learning_rate"] == rate), key=lambda run: run.curve.tokens[-1])
        for run in group:
            if run is not best and run.row["learning_rate"] == rate:
                yield run.name, f"it repeats {best.name}: the same mixer, size, seed and learning rate"
            elif run is not best:
                its_rate = "another learning rate" if rate is None else f"the learning rate {rate:g}"
                yield run.name, f"{best.name}, with {its_rate}, has a lower loss"


# columns of a table
REQUIRED = ("name", "mixers", "parameters_without_embeddings", "training_flops_per_token", "tokens", "train_loss")
OPTIONAL = ("learning_rate", "seed", "context_length", "data_hash")
COLUMNS_HELP = "docs/scaling.md lists the columns"


def read_run_table(file: Path) -> list[tuple[dict[str, Any], Curve]]:
    """Return the settings and the training curve of each run in a CSV.

    `tokens` and `train_loss` hold as many numbers as the curve has points, separated by spaces, or one number each. A
    loss that is not a number marks a run that diverged. Columns beyond `REQUIRED` and `OPTIONAL` are ignored.

    Raises:
        UserError: The file is empty or not a CSV, lacks a column, or holds something else where there must be a number.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            rows = [(reader.line_num, row) for row in reader]
            header = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"runs: {file} cannot be read as a CSV in UTF-8: {error}") from None
    if missing := [column for column in REQUIRED if column not in header] if header else []:
        raise UserError(f"runs: {file} has no column {missing[0]!r}; {COLUMNS_HELP}")
    if not rows:
        raise UserError(f"runs: {file} is empty; it needs a line with the columns and one for each run; {COLUMNS_HELP}")
    runs: dict[str, tuple[dict[str, Any], Curve]] = {}
    for line, row in rows:
        where = f"runs: {file}, line {line}"
        if None in row or None in row.values():
            raise UserError(f"{where}: has {'more' if None in row else 'fewer'} fields than the {len(header)} columns")
        if row["name"] in runs:
            raise UserError(f"{where}: the name {row['name']!r} is that of an earlier run; names must differ")
        runs[row["name"]] = _settings(where, row), _curve(where, row, f"{file}: {row['name']}")
    return [*runs.values()]


def _settings(where: str, row: Mapping[str, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {name: row.get(name) or None for name in OPTIONAL}
    for name in ("learning_rate", "seed", "context_length"):
        if settings[name] is not None:
            (settings[name],) = _numbers(where, row, name, several=False)
    return settings


def _curve(where: str, row: Mapping[str, str], name: str) -> Curve:
    if not row["mixers"]:
        raise UserError(f"{where}: mixers is empty; name what the laws are compared by")
    (size,) = _numbers(where, row, "parameters_without_embeddings", several=False)
    (flops,) = _numbers(where, row, "training_flops_per_token", several=False)
    tokens, losses = np.array(_numbers(where, row, "tokens")), np.array(_numbers(where, row, "train_loss", nan=True))
    if len(tokens) != len(losses):
        raise UserError(f"{where}: tokens has {len(tokens)} numbers and train_loss {len(losses)}; give as many of both")
    if np.any(np.diff(tokens) <= 0):
        raise UserError(f"{where}: tokens must rise from each number to the next")
    return Curve(name, row["mixers"], size, flops, tokens, losses)


def _numbers(where: str, row: Mapping[str, str], name: str, several: bool = True, nan: bool = False) -> list[float]:
    """The positive numbers in a field; NaN for each that is none, if `nan`."""
    words = row[name].split() if several else [row[name]]
    numbers = []
    for word in words or [""]:
        try:
            number = float(word)
        except ValueError:
            number = -1.0
        if nan and not math.isfinite(number):
            number = math.nan
        elif not 0 <= number < math.inf or (number == 0 and name != "seed"):
            raise UserError(f"{where}: {name} is {word[:40]!r}, and must be a positive number; {COLUMNS_HELP}")
        numbers.append(number)
    return numbers
