"""Loss, best size and best number of tokens as functions of compute, by two ways of reading training curves.

`envelope`: at each amount of compute the run with the lowest loss is the optimum (arXiv 2406.16690; the first approach
of arXiv 2203.15556). `isoflop`: at a few amounts of compute a parabola over log size has the optimum (the second one).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from kernels import UserError
from zoo.scaling.curves import Curve, ladder, sizes
from zoo.scaling.power import Numbers, PowerLaw, fit_falling_power_with_offset, fit_power

Method = Literal["envelope", "isoflop", "parametric"]
LEAST_SIZES, LEAST_SPAN = 4, 8.0  # of a ladder: different sizes, and the largest over the smallest
METHODS: tuple[Method, ...] = get_args(Method)
BINS, BUDGETS, LEAST_BUDGETS = 1500, 12, 3


class Optima(NamedTuple):
    """The best model at each amount of compute.

    Attributes:
        flops: Compute [P].
        losses, sizes, tokens: Of the best model, [P].
        left_out: Why amounts of compute have no optimum, and how many do not.
    """

    flops: Numbers
    losses: Numbers
    sizes: Numbers
    tokens: Numbers
    left_out: dict[str, int]


class Laws(NamedTuple):
    """Functions of compute C in FLOPs: L(C), N_opt(C), D_opt(C)."""

    loss: PowerLaw
    size: PowerLaw
    tokens: PowerLaw

    @property
    def balance(self) -> float:
        """The exponents of N_opt and D_opt together: 1 if FLOPs per token are proportional to the size."""
        return self.size.exponent + self.tokens.exponent


def check_ladder(curves: Sequence[Curve]) -> None:
    """Refuse runs that no law can be read off.

    Raises:
        UserError: There are too few sizes, or they are too close.
    """
    model_sizes = sizes(curves)
    if len(model_sizes) < LEAST_SIZES:
        raise UserError(
            f"it cannot be fitted, because {len(model_sizes)} size{'s' * (len(model_sizes) != 1)} of model "
            f"{'were' if len(model_sizes) != 1 else 'was'} trained; {LEAST_SIZES} are needed"
        )
    if model_sizes[-1] < LEAST_SPAN * model_sizes[0]:
        raise UserError(
            f"it cannot be fitted, because the largest model has only {model_sizes[-1] / model_sizes[0]:.1f} times "
            f"the parameters of the smallest ({model_sizes[0]:.3g} without embeddings); {LEAST_SPAN:g} times are needed"
        )


def envelope(curves: Sequence[Curve]) -> Optima:
    """The lowest loss at each amount of compute.

    Where the smallest or the largest model that was trained with that compute is the best, a still smaller or larger
    one might be better: left out.

    Raises:
        UserError: Fewer than two sizes are best anywhere between the others.
    """
    grid = _grid(curves)
    model_sizes, losses, tokens = ladder(curves, grid)
    reached = np.isfinite(losses)
    several = reached.sum(0) >= 2
    best = np.argmin(np.where(reached, losses, np.inf), axis=0)
    smallest = several & (best == reached.argmax(0))
    largest = several & (best == len(model_sizes) - 1 - reached[::-1].argmax(0))
    inside = several & ~smallest & ~largest
    if len(np.unique(best[inside])) < 2:
        raise UserError(
            "it cannot be fitted, because fewer than two sizes between the smallest and the largest are the best at "
            "any amount of compute; train more sizes, or longer"
        )
    left_out = {
        "fewer than two sizes have got there": int((~several).sum()),
        "the smallest size that was trained there is the best": int(smallest.sum()),
        "the largest size that was trained there is the best": int(largest.sum()),
    }
    columns = np.flatnonzero(inside)
    rows = best[columns]
    return Optima(grid[columns], losses[rows, columns], model_sizes[rows], tokens[rows, columns], left_out)


def isoflop(curves: Sequence[Curve]) -> Optima:
    """The lowest point of a parabola over log size at each of a few amounts of compute.

    These are spread evenly over log compute, from the first to the last that four sizes have got to.

    Raises:
        UserError: No amount of compute has four sizes, or fewer than three parabolas have their lowest point between
            the sizes.
    """
    everywhere = _grid(curves)
    enough = everywhere[np.isfinite(ladder(curves, everywhere).losses).sum(0) >= LEAST_SIZES]
    if not len(enough):
        raise UserError(f"it cannot be fitted, because at no amount of compute {LEAST_SIZES} sizes have got there")
    grid = np.geomspace(enough[0], enough[-1], BUDGETS)
    model_sizes, losses, tokens = ladder(curves, grid)
    minima, left_out = [], {"fewer than four sizes have got there": 0, "the parabola has no lowest point inside": 0}
    for column, flops in enumerate(grid):
        reached = np.isfinite(losses[:, column])
        if reached.sum() < LEAST_SIZES:
            left_out["fewer than four sizes have got there"] += 1
            continue
        logs = np.log(model_sizes[reached])
        bend, slope, height = np.polyfit(logs - logs.mean(), losses[reached, column], 2)
        lowest = logs.mean() - slope / (2 * bend) if bend > 0 else np.inf
        if not logs[0] < lowest < logs[-1]:
            left_out["the parabola has no lowest point inside"] += 1
            continue
        spent = np.exp(np.interp(lowest, logs, np.log(tokens[reached, column])))
        minima.append((flops, height - slope**2 / (4 * bend), np.exp(lowest), spent))
    if len(minima) < LEAST_BUDGETS:
        reasons = "; ".join(f"at {count} {reason}" for reason, count in left_out.items() if count)
        raise UserError(
            f"it cannot be fitted, because only {len(minima)} of {BUDGETS} IsoFLOP curves have their optimum between "
            f"the sizes that were trained ({reasons})"
        )
    at, lowest_losses, best_sizes, best_tokens = np.array(minima).T
    return Optima(at, lowest_losses, best_sizes, best_tokens, left_out)


def laws(optima: Optima) -> Laws:
    """Power laws without an offset through the optima."""
    return Laws(*(fit_power(optima.flops, y) for y in (optima.losses, optima.sizes, optima.tokens)))


class Offset(NamedTuple):
    """Evidence on whether L(C) needs an offset: both forms, and their errors on the held-out largest best size.

    Attributes:
        power: β·C^−α, fitted to all.
        with_offset: ε + β·C^−α, fitted to all.
        errors: Mean relative error of each on what was held out.
    """

    power: PowerLaw
    with_offset: PowerLaw
    errors: tuple[float, float]


def offset(optima: Optima) -> Offset | None:
    """Compare the two forms of L(C) where the largest of the best sizes is held out; None if too little is left."""
    held_out = optima.sizes == optima.sizes.max()
    if len(np.unique(optima.flops[~held_out])) < 3:
        return None
    x, y = optima.flops, optima.losses
    errors = []
    for fit in (fit_power, fit_falling_power_with_offset):
        law = fit(x[~held_out], y[~held_out])
        errors.append(float(np.mean(np.abs(law(x[held_out]) / y[held_out] - 1))))
    return Offset(fit_power(x, y), fit_falling_power_with_offset(x, y), (errors[0], errors[1]))


def _grid(curves: Sequence[Curve]) -> Numbers:
    """Amounts of compute from the first to the last of all curves."""
    low, high = min(curve.flops[0] for curve in curves), max(curve.flops[-1] for curve in curves)
    return np.geomspace(low, high, BINS)
