"""The laws of one mixer, with intervals, and where two cross."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from kernels import UserError
from zoo.scaling.curves import Curve, sizes
from zoo.scaling.optima import Laws, Method, Offset, Optima, check_ladder, envelope, isoflop, laws, offset
from zoo.scaling.parametric import Parametric, fit_parametric, points_of
from zoo.scaling.power import Numbers, PowerLaw

BEYOND = 10.0  # how far laws are drawn and crossings looked for, beyond the compute that was spent
LEAST_DRAWS = 0.5  # of the draws of a bootstrap, for an interval
FITTED = 3  # constants of the parametric form that follow differences between runs: E, A, α


@dataclass(frozen=True)
class Law:
    """The laws of one mixer.

    Attributes:
        mixer: Its name.
        method: How they were read off the curves.
        curves: The runs.
        laws: L(C), N_opt(C) and D_opt(C), for C in FLOPs.
        optima: The points behind them; None for the parametric form.
        parametric: The constants of the parametric form; None for other methods.
        offset: Whether L(C) needs an offset; None if that is undecided, and for the parametric form, which has one.
        draws: The laws of each draw of the bootstrap that could be fitted.
        failed_draws: How many could not.
    """

    mixer: str
    method: Method
    curves: list[Curve]
    laws: Laws
    optima: Optima | None = None
    parametric: Parametric | None = None
    offset: Offset | None = None
    draws: list[Laws] = field(default_factory=list)
    failed_draws: int = 0

    def interval(self, number: Callable[[Laws], float]) -> tuple[float, float] | None:
        """The middle 95 % of a number over the draws; None if fewer than half of them could be fitted."""
        count = len(self.draws) + self.failed_draws
        if not count or len(self.draws) < LEAST_DRAWS * count:
            return None
        return _middle([number(drawn) for drawn in self.draws])


def fit_law(curves: Sequence[Curve], method: Method, draws: int = 200, seed: int = 0) -> Law:
    """The laws of one mixer.

    Each draw of the bootstrap refits runs that were made anew (`redrawn`); whole runs, since points of one curve are
    not independent of each other.

    Raises:
        UserError: The runs do not determine a law; the message begins with the mixer.
    """
    curves, mixer = list(curves), curves[0].mixer
    try:
        check_ladder(curves)
        law = _fit(curves, method)
        _check_range(law)
    except UserError as error:
        raise UserError(f"{mixer}: {error}") from None
    generator = np.random.default_rng(seed)
    fitted_draws: list[Laws] = []
    with suppress(UserError):  # without a parametric form there are no intervals
        form = law.parametric or fit_parametric(points_of(curves))
        for drawn in (redrawn(curves, form, generator) for _ in range(draws)):
            with suppress(UserError):
                fitted_draws.append(_fit(drawn, method, form).laws)
    tested = None if law.optima is None else offset(law.optima)
    return replace(law, draws=fitted_draws, failed_draws=draws - len(fitted_draws), offset=tested)


def redrawn(curves: Sequence[Curve], form: Parametric, generator: np.random.Generator) -> list[Curve]:
    """The runs as they might have been: each is the parametric form, off by as much as a random run was all along it.

    (Drawing runs in place of what they are off by would leave most draws without one of a few sizes.) Signs are drawn,
    too, and what runs are off by is scaled up, since the form was fitted to them, and as Student's t is wider for few.
    """
    from scipy.stats import t as student

    places = [_places(curve.tokens) for curve in curves]
    models = [form(np.full_like(c.tokens, c.size), c.tokens) for c in curves]
    off = [np.log(c.losses / model) for c, model in zip(curves, models, strict=True)]
    freedom = len(curves) - FITTED
    scale = np.sqrt(len(curves) / freedom) * student.ppf(0.975, freedom) / student.ppf(0.975, np.inf)
    drawn = []
    for curve, place, model in zip(curves, places, models, strict=True):
        other, sign = generator.integers(len(curves)), generator.choice([-1.0, 1.0])
        factor = np.exp(sign * scale * np.interp(place, places[other], off[other]))
        drawn.append(replace(curve, losses=model * factor))
    return drawn


def _places(tokens: Numbers) -> Numbers:
    """The places of a curve's points along it, from 0 to 1, over log tokens."""
    return np.log(tokens / tokens[0]) / (np.log(tokens[-1] / tokens[0]) or 1.0)


def _fit(curves: list[Curve], method: Method, start: Parametric | None = None) -> Law:
    mixer = curves[0].mixer
    if method == "parametric":
        parametric = fit_parametric(points_of(curves), start)
        per_product = float(np.exp(np.mean([np.log(curve.flops_per_token / curve.size) for curve in curves])))
        return Law(mixer, method, curves, parametric.laws(per_product), parametric=parametric)
    optima = envelope(curves) if method == "envelope" else isoflop(curves)
    return Law(mixer, method, curves, laws(optima), optima=optima)


def _check_range(law: Law) -> None:
    """Refuse a law that says nothing about the sizes that were trained.

    Raises:
        UserError: At the compute of a typical run the best size is smaller or larger than all of them.
    """
    spent = float(np.exp(np.median([np.log(curve.flops[-1]) for curve in law.curves])))
    best, model_sizes = float(law.laws.size(spent)), sizes(law.curves)
    if not model_sizes[0] <= best <= model_sizes[-1]:
        raise UserError(
            f"it cannot be fitted, because its best size for {spent:.2g} FLOPs, {best:.3g} parameters, lies outside of "
            f"the sizes that were trained, {model_sizes[0]:.3g} to {model_sizes[-1]:.3g}"
        )


def crossing(one: Laws, other: Laws, between: tuple[float, float]) -> float | None:
    """The compute at which two laws of the loss are equal; None if they are not between two amounts of compute."""
    from scipy.optimize import brentq

    def difference(log_flops: float) -> float:
        flops = np.exp(log_flops)
        return float(one.loss(flops) - other.loss(flops))

    low, high = np.log(between[0]), np.log(between[1])
    grid: Numbers = np.linspace(low, high, 200)
    signs = np.sign([difference(x) for x in grid])
    changes = np.flatnonzero(signs[:-1] * signs[1:] < 0)
    return float(np.exp(brentq(difference, grid[changes[0]], grid[changes[0] + 1]))) if len(changes) else None


class Crossing(NamedTuple):
    """Compute at which two mixers have the same loss, by their laws.

    Attributes:
        mixers: The two, the one with the lower loss below the crossing first.
        flops: The compute at which they cross; None if they do not, within `between`: the first is better everywhere.
        flops_interval: The middle 95 % of `flops` over pairs of draws; None if fewer than half of the pairs cross.
        loss: The loss of both there.
        crossed: The fraction of pairs of draws that cross; None without draws.
        between: The amounts of compute between which a crossing was looked for.
        spent: The most compute that runs of both have spent.
        difference: The middle 95 % over pairs of draws of how much higher the loss of the second is there; None
            without draws.
    """

    mixers: tuple[str, str]
    flops: float | None
    flops_interval: tuple[float, float] | None
    loss: float | None
    crossed: float | None
    between: tuple[float, float]
    spent: float
    difference: tuple[float, float] | None


def crossings(laws: Sequence[Law]) -> list[Crossing]:
    """Return the crossing of each pair of mixers, within the `span` of all."""
    between = span(laws)
    return [_crossing(one, other, between) for one, other in combinations(laws, 2)]


def span(laws: Sequence[Law]) -> tuple[float, float]:
    """From the least compute that a run has spent to `BEYOND` times the most."""
    flops = np.concatenate([curve.flops[[0, -1]] for law in laws for curve in law.curves])
    return float(flops.min()), float(flops.max()) * BEYOND


def _crossing(one: Law, other: Law, between: tuple[float, float]) -> Crossing:
    at = crossing(one.laws, other.laws, between)
    first, second = sorted((one, other), key=lambda law: float(law.laws.loss(between[0])))
    pairs = list(zip(first.draws, second.draws, strict=False))
    points = [point for a, b in pairs if (point := crossing(a, b, between)) is not None]
    enough = at is not None and pairs and len(points) >= LEAST_DRAWS * len(pairs)
    spent = min(max(float(curve.flops[-1]) for curve in law.curves) for law in (one, other))
    return Crossing(
        mixers=(first.mixer, second.mixer),
        flops=at,
        flops_interval=_middle(points) if enough else None,
        loss=None if at is None else float(one.laws.loss(at)),
        crossed=len(points) / len(pairs) if pairs else None,
        between=between,
        spent=spent,
        difference=_middle([float(b.loss(spent) - a.loss(spent)) for a, b in pairs]) if pairs else None,
    )


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of values."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def as_row(law: Law) -> dict[str, Any]:
    """A law as plain values, for JSON."""
    row: dict[str, Any] = {
        "mixer": law.mixer,
        "method": law.method,
        "runs": [curve.run for curve in law.curves],
        "sizes": sorted({curve.size for curve in law.curves}),
        "draws": len(law.draws),
        "failed_draws": law.failed_draws,
    }
    for part in Laws._fields:
        for constant in PowerLaw._fields if part == "loss" else ("coefficient", "exponent"):
            number = attrgetter(f"{part}.{constant}")
            row[f"{part}_{constant}"] = number(law.laws)
            row[f"{part}_{constant}_interval"] = law.interval(number)
    if law.parametric is not None:
        row["parametric"] = law.parametric._asdict()
    if law.offset is not None:
        row["with_offset"] = law.offset.with_offset._asdict()
        row["held_out_errors"] = {"power": law.offset.errors[0], "with_offset": law.offset.errors[1]}
    if law.optima is not None:
        row["left_out"] = law.optima.left_out
    return row
