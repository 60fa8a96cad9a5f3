"""The definition of a sweep: its axes, runs, and the conditions that its results must meet."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jsonargparse import Namespace

import mixers
from kernels import UserError
from zoo.config.build import from_config, instantiate
from zoo.config.find import find_config
from zoo.config.keys import KEYS
from zoo.config.overlays import is_override
from zoo.config.parser import read
from zoo.config.trainer import check_training
from zoo.display import SOON, progress_bar
from zoo.train.results import COLUMNS

_PAIRS = re.compile(r"(?:.*_)?pairs_(\d+)")
LEVELS = {"pairs_at_50": 0.5, "pairs_at_90": 0.9}  # columns, and the accuracies that they stand for


def pairs_at(accuracies: Mapping[int, float], level: float) -> float:
    """Return the number of pairs at which the accuracy first falls below a level, interpolated linearly in log(pairs).

    It is infinity if no accuracy is below the level, and 0 if that of the fewest pairs is.
    """
    points = sorted(accuracies.items())
    if points[0][1] < level:
        return 0.0
    for (fewer, above), (more, below) in zip(points, points[1:], strict=False):
        if below < level:
            return fewer * (more / fewer) ** ((above - level) / (above - below))
    return math.inf


def with_capacity(row: dict[str, Any]) -> dict[str, Any]:
    """A results row with `pairs_at_50` and `pairs_at_90`, if its tasks differ in nothing but the number of pairs.

    (At one number of pairs in two lengths there would be two accuracies.)
    """
    tasks = row.get("val_accuracy_by_task") or {}
    accuracies = {int(match[1]): value for name, value in tasks.items() if (match := _PAIRS.fullmatch(name))}
    if len(accuracies) < 2 or len(accuracies) < len(tasks) or None in accuracies.values():
        return row
    return row | {name: pairs_at(accuracies, level) for name, level in LEVELS.items()}


@dataclass(frozen=True)
class Gate:
    """Numbers that runs must reach.

    Args:
        numbers: Numbers in `results.json`, such as `val_accuracy_by_task.pairs_4`.
        at_least: What each of them must be at least; null: no bound.
        at_most: What each of them may be at most; null: no bound.
        where: Axis (or `control`) → label: the cells that it is about; by default all of them.

    Raises:
        UserError: There are no numbers, or no bound.
    """

    numbers: list[str]
    at_least: float | None = None
    at_most: float | None = None
    where: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if not self.numbers:
            raise UserError("gates.numbers: the list is empty; name a number in results.json")
        if self.at_least is None and self.at_most is None:
            raise UserError(f"gates: {', '.join(self.numbers)} has no bound; give at_least or at_most")

    def concerns(self, cell: Mapping[str, str]) -> bool:
        """Return whether a cell is one that it is about."""
        return all(cell.get(axis) == label for axis, label in (self.where or {}).items())

    def failure(self, row: Mapping[str, Any]) -> str | None:
        """Describe the failure in a flat results row; None if there is none."""
        for name in self.numbers:
            value = row.get(name)
            if value is None or math.isnan(value):
                return f"{name} is missing"
            if self.at_least is not None and value < self.at_least:
                return f"{name} is {value:.3g}, below {self.at_least:g}"
            if self.at_most is not None and value > self.at_most:
                return f"{name} is {value:.3g}, above {self.at_most:g}"
        return None


CONTROL = "control"  # takes the place of an axis in the cells of controls
NUMBERS = (*COLUMNS, *LEVELS)  # numbers, or groups of numbers, that runs can be compared by


Cell = tuple[tuple[str, str], ...]  # axis → label


class Run(NamedTuple):
    """One run of a sweep."""

    name: str
    sources: tuple[str, ...]  # configs, inline overlays and `key=value` overrides, in order
    cell: Cell = ()
    learning_rate: float | None = None
    seed: int | None = None
    parsed: Namespace | None = None  # the config of its cell, whose runs differ in seed and learning rate

    def read(self) -> Namespace:
        """The parsed config; a UserError if a file is missing, or a key or value is wrong."""
        return read(*self.sources)

    def check(self) -> Namespace:
        """The parsed config, of which everything but the trainer was built, without allocating memory for the model.

        Raises:
            UserError: A constructor rejects a value, or the run would train nothing.
        """
        parsed = self.read()
        check_training(parsed.trainer)
        config = parsed.clone()
        for key in ("data", "optim", "checkpoints"):
            instantiate(key, config)
        config.model.vocab_size = config.model.vocab_size or 1024  # any value, as the tokenizer may not be trained yet
        from_config(config, device="meta")
        return parsed

    def arguments(self) -> list[str]:
        """The run's config as command-line arguments."""
        arguments: list[str] = []
        for source in self.sources:
            arguments += [f"--{source.lstrip('-')}"] if is_override(source) else ["--config", source]
        return arguments


class Point(NamedTuple):
    """One value of an axis."""

    label: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """A base config, the axes to vary, and the metric to compare.

    Args:
        base: A config, or a list of a config and overlays: files, inline overlays, `key=value`.
        axes: The axes, of which all combinations are run. Either a dotted key with a list of values
            (`model.stack.mixer.factor: [1, 2, 4]`), or any name with labelled overlays: a file, an inline overlay, or a
            list of these (`features: {relu: ablate/l2_relu.yaml, wide: {model: {num_heads: 1}}}`).
        controls: Labelled overlays to compare with, outside the grid of the axes; horizontal lines in the picture. Null
            is the base itself.
        seeds: Values of `seed_everything`, with each of which every cell is run.
        learning_rates: Values of `optim.learning_rate`, of which each cell reports the best; empty: that of the base.
        metric: The number in `results.json` to compare; or `pairs_at_50` or `pairs_at_90`, the number of pairs at which
            the accuracy of tasks named `pairs_4`, `pairs_16` … falls below that.
        mode: Whether the lowest or the highest value is best.
        x: The picture's horizontal axis: one of the axes, or a number in `results.json` such as `state_size`; by
            default the first axis.
        lines: The axes whose values become lines in the picture; by default all but `x`.
        also: Further numbers to show next to the metric, as columns of the table and as panels of the picture.
        gates: What runs must reach for the results to mean something. Whatever does not is marked and named.
        runs_in: The folder of the runs, unless `--folder` names one; null for `runs/NAME` after the sweep's name.

    Raises:
        UserError: `seeds`, `learning_rates`, `metric`, `x`, `lines`, `also` or `gates` is invalid.
    """

    base: str | list[str | dict[str, Any]]
    axes: dict[str, Any] = field(default_factory=dict)
    controls: dict[str, Any | None] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    learning_rates: list[float] = field(default_factory=list)
    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    x: str | None = None
    lines: list[str] | None = None
    also: list[str] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    runs_in: str | None = None

    def __post_init__(self) -> None:
        if not self.seeds:
            raise UserError("seeds: the list is empty; a sweep needs at least one")
        for name in ("seeds", "learning_rates"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise UserError(f"{name}: {values} has a value twice")
        named = [("metric", self.metric), *(("also", number) for number in self.also)]
        named += [] if self.x is None or self.x in self.axes else [("x", self.x)]
        named += [("gates.numbers", number) for gate in self.gates for number in gate.numbers]
        for name, number in named:
            if number.split(".")[0] not in NUMBERS:
                raise UserError(
                    f"{name}: {number!r} is not a number in results.json{mixers.did_you_mean(number, [*NUMBERS])} "
                    f"({', '.join(NUMBERS)})"
                )
        for axis in self.lines or []:
            if axis not in self.axes:
                raise UserError(f"lines: {axis!r} is not one of the axes{mixers.did_you_mean(axis, list(self.axes))}")

    def runs(self, overrides: tuple[str, ...] = ()) -> list[Run]:
        """All runs, with their configs checked.

        Args:
            overrides: `key=value` overrides for all runs, applied last.

        Raises:
            UserError: A key, value or file of a run is wrong, or two cells have the same config apart from what `seeds`
                and `learning_rates` set.
        """
        base = _overlays("base", self.base)
        Run("base", base).read()
        for override in overrides:
            key = override.partition("=")[0]
            if key == "seed_everything" or (key == "optim.learning_rate" and self.learning_rates):
                setting = "seeds" if key == "seed_everything" else "learning_rates"
                raise UserError(f"{key}: the runs of a sweep differ in it; set {setting} instead")
        axes = {name: _points(name, values) for name, values in self.axes.items()}
        short = _short_names(list(axes))
        grid = [dict(zip(axes, points, strict=True)) for points in itertools.product(*axes.values())]
        grid += [{CONTROL: Point(label, _overlays(f"controls.{label}", o))} for label, o in self.controls.items()]
        runs: list[Run] = []
        configs, grid_cells = list[Namespace](), list[Cell]()
        for points in progress_bar(grid, desc="configs", unit=" cells", delay=SOON, leave=False):
            cell = tuple((name, point.label) for name, point in points.items())
            sources = base + tuple(source for point in points.values() for source in point.sources)
            parsed = Run("cell", sources + overrides, cell).check()
            own = parsed.clone()
            own.seed_everything = None  # which `seeds` set, as `learning_rates` the other
            if self.learning_rates:
                own.optim.learning_rate = None
            if own in configs:
                same = _place(grid_cells[configs.index(own)])
                raise UserError(f"axes: {same} and {_place(cell)} have the same config")
            configs.append(own)
            grid_cells.append(cell)
            for rate, seed in itertools.product(self.learning_rates or [None], self.seeds):  # type: ignore[list-item]
                settings = [f"seed_everything={seed}"] + ([] if rate is None else [f"optim.learning_rate={rate}"])
                place = [(short.get(name, name), label) for name, label in cell]
                place += ([] if rate is None else [("lr", f"{rate:g}")]) + [("seed", str(seed))]
                name = ",".join(f"{_slug(key)}={_slug(value)}" for key, value in place)
                runs.append(Run(name, (*sources, *settings, *overrides), cell, rate, seed, parsed))
        if len({run.name for run in runs}) < len(runs):
            raise UserError("axes: two values have the same name; label them: {name: {label: overlay, …}}")
        for rate in self.learning_rates:
            next(run for run in runs if run.learning_rate == rate).check()
        for gate in self.gates:
            if not any(gate.concerns(dict(run.cell)) for run in runs):
                raise UserError(f"gates.where: {gate.where} is not a cell of this sweep")
        return runs


def _place(cell: Cell) -> str:
    return ", ".join(f"{axis}: {label}" for axis, label in cell)


def _points(axis: str, values: Any) -> list[Point]:
    """The values of an axis as labelled sources."""
    if isinstance(values, Mapping):
        points = [Point(str(label), _overlays(f"axes.{axis}.{label}", overlay)) for label, overlay in values.items()]
    elif not isinstance(values, list):
        raise UserError(f"axes.{axis}: {values!r} is neither a list of values nor a mapping of labels to overlays")
    elif duplicates := [value for value, count in Counter(map(_key, values)).items() if count > 1]:
        raise UserError(f"axes.{axis}: {duplicates[0]} is listed twice")
    elif axis.split(".")[0] in KEYS:
        points = [Point(_text(value), (f"{axis}={_text(value)}",)) for value in values]
    elif all(isinstance(value, str) and value.endswith((".yaml", ".yml")) for value in values):
        points = [Point(Path(value).stem, _overlays(f"axes.{axis}", value)) for value in values]
    else:
        hint = mixers.did_you_mean(axis.split(".")[0], list(KEYS))
        raise UserError(
            f"axes.{axis}: is neither a key of a config{hint} (these start with {', '.join(KEYS)}) "
            "nor a name with overlays"
        )
    if not points:
        raise UserError(f"axes.{axis}: has no values")
    return points


def _overlays(key: str, value: Any) -> tuple[str, ...]:
    """The sources for a file, an inline overlay, an override, or a list of these; `key` is for messages."""
    if value is None:
        return ()
    if isinstance(value, str):
        if not is_override(value):
            find_config(value)
        return (value,)
    if isinstance(value, Mapping):
        return (json.dumps(value),)
    if isinstance(value, list):
        return tuple(source for item in value for source in _overlays(key, item))
    raise UserError(f"{key}: {value!r} is neither a file, nor an inline overlay, nor a list of these")


def _text(value: Any) -> str:
    """A value in the notation of the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _key(value: Any) -> str | float:
    """A value for comparisons: 1 and 1.0 are the same, but 1 and true are not."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else _text(value)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "none"


def _short_names(keys: list[str]) -> dict[str, str]:
    """Each dotted key → its shortest suffix that distinguishes it from the others."""
    short = {}
    for key in keys:
        parts = key.split(".")
        others = [other.split(".") for other in keys if other != key]
        count = next(
            n for n in range(1, len(parts) + 1) if n == len(parts) or all(o[-n:] != parts[-n:] for o in others)
        )
        short[key] = ".".join(parts[-count:])
    return short
