"""From the YAML of a sweep to its runs."""

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jsonargparse import Namespace

import mixers
from kernels import UserError
from zoo.config.build import from_config, instantiate
from zoo.config.find import find_config
from zoo.config.overlays import is_override
from zoo.config.parser import KEYS, read
from zoo.train.results import COLUMNS

CONTROL = "control"  # in the place of an axis


class Run(NamedTuple):
    """One run of a sweep."""

    name: str
    sources: tuple[str, ...]  # configs, inline overlays and `key=value` overrides, in order
    cell: tuple[tuple[str, str], ...] = ()  # axis → label
    learning_rate: float | None = None
    seed: int | None = None

    def read(self) -> Namespace:
        """The parsed config.

        Raises:
            UserError: A file is missing, or a key or value is wrong.
        """
        return read(*self.sources)

    def check(self) -> None:
        """Build all of it but the trainer, without memory for the model.

        Raises:
            UserError: The constructors refuse something.
        """
        config = self.read()
        for key in ("data", "optim", "checkpoints"):
            instantiate(key, config)
        config.model.vocab_size = config.model.vocab_size or 1024  # any: the tokenizer may not be trained yet
        from_config(config, device="meta")

    def arguments(self) -> list[str]:
        """The same for the command line."""
        arguments: list[str] = []
        for source in self.sources:
            arguments += [f"--{source}"] if is_override(source) else ["--config", source]
        return arguments


class Point(NamedTuple):
    """One value of an axis."""

    label: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """A base, what to vary, and what to look at.

    Args:
        base: A config, or a list of it and overlays: files, inline overlays, `key=value`.
        axes: What varies; all combinations are run. A dotted key with a list of its values
            (`model.stack.mixer.factor: [1, 2, 4]`), or a name of your own with labelled overlays: a file, an inline
            overlay, or a list of these (`features: {relu: ablate/l2_relu.yaml, wide: {model: {num_heads: 1}}}`).
        controls: Labelled overlays to compare with, outside the grid of the axes; horizontal lines in the picture.
        seeds: Values of `seed_everything`; each cell is run with every one.
        learning_rates: Values of `optim.learning_rate`, the best of which stands for its cell; empty: the base's.
        metric: A number of `results.json` to compare.
        mode: Whether its lowest or its highest value is best.
        x: The picture's horizontal axis: one of the axes, or a number of `results.json` such as `state_size`; by
            default the first axis.
        lines: The axes whose values become lines in the picture; by default all but `x`.
    """

    base: str | list[str | dict[str, Any]]
    axes: dict[str, Any] = field(default_factory=dict)
    controls: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    learning_rates: list[float] = field(default_factory=list)
    metric: str = "val_loss"
    mode: Literal["min", "max"] = "min"
    x: str | None = None
    lines: list[str] | None = None

    def __post_init__(self) -> None:
        if not self.seeds:
            raise UserError("seeds: the list is empty; a sweep needs one at least")
        for name in ("seeds", "learning_rates"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise UserError(f"{name}: {values} has a value twice")
        named = {"metric": self.metric, **({} if self.x is None or self.x in self.axes else {"x": self.x})}
        for name, number in named.items():
            if number.split(".")[0] not in COLUMNS:
                raise UserError(
                    f"{name}: {number!r} is no number of results.json{mixers.did_you_mean(number, [*COLUMNS])} "
                    f"({', '.join(COLUMNS)})"
                )
        for axis in self.lines or []:
            if axis not in self.axes:
                raise UserError(f"lines: {axis!r} is none of the axes{mixers.did_you_mean(axis, list(self.axes))}")

    def runs(self, overrides: tuple[str, ...] = ()) -> list[Run]:
        """All runs, each config checked.

        Args:
            overrides: `key=value` for all of them, after everything else.

        Raises:
            UserError: A key, a value or a file of some run is wrong; said before anything has started.
        """
        base = _overlays("base", self.base)
        Run("base", base).read()
        axes = {name: _points(name, values) for name, values in self.axes.items()}
        short = _short_names(list(axes))
        grid = [dict(zip(axes, points, strict=True)) for points in itertools.product(*axes.values())]
        grid += [{CONTROL: Point(label, _overlays(f"controls.{label}", o))} for label, o in self.controls.items()]
        runs = []
        for points in grid:
            cell = tuple((name, point.label) for name, point in points.items())
            sources = base + tuple(source for point in points.values() for source in point.sources)
            Run("cell", sources + overrides, cell).check()
            for rate, seed in itertools.product(self.learning_rates or [None], self.seeds):  # type: ignore[list-item]
                own = [f"seed_everything={seed}"] + ([] if rate is None else [f"optim.learning_rate={rate}"])
                place = [(short.get(name, name), label) for name, label in cell]
                place += ([] if rate is None else [("lr", f"{rate:g}")]) + [("seed", str(seed))]
                name = ",".join(f"{_slug(key)}={_slug(value)}" for key, value in place)
                runs.append(Run(name, (*sources, *own, *overrides), cell, rate, seed))
        if len({run.name for run in runs}) < len(runs):
            raise UserError("axes: two values have the same name; label them: {name: {label: overlay, …}}")
        for rate in self.learning_rates:
            next(run for run in runs if run.learning_rate == rate).check()
        return runs


def _points(axis: str, values: Any) -> list[Point]:
    """The values of an axis as labelled sources."""
    if isinstance(values, Mapping):
        points = [Point(str(label), _overlays(f"axes.{axis}.{label}", given)) for label, given in values.items()]
    elif not isinstance(values, list):
        raise UserError(f"axes.{axis}: {values!r} is neither a list of values nor a mapping of labels to overlays")
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


def _overlays(where: str, given: Any) -> tuple[str, ...]:
    """Files, inline overlays, overrides, or lists of these, as sources."""
    if given is None:
        return ()
    if isinstance(given, str):
        if not is_override(given):
            find_config(given)
        return (given,)
    if isinstance(given, Mapping):
        return (json.dumps(given),)
    if isinstance(given, list):
        return tuple(source for one in given for source in _overlays(where, one))
    raise UserError(f"{where}: {given!r} is neither a file, nor an inline overlay, nor a list of these")


def _text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-") or "none"


def _short_names(keys: list[str]) -> dict[str, str]:
    """The fewest last parts of each dotted key that tell it from the others."""
    short = {}
    for key in keys:
        parts = key.split(".")
        others = [other.split(".") for other in keys if other != key]
        count = next(
            n for n in range(1, len(parts) + 1) if n == len(parts) or all(o[-n:] != parts[-n:] for o in others)
        )
        short[key] = ".".join(parts[-count:])
    return short
