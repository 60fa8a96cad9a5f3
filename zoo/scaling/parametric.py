"""L(N, D) = E + A/N^α + B/D^β, the third approach of arXiv 2203.15556, fitted so that the optimiser arrives.

The robust loss is a sum over points, in units of its width: averaged, it is so flat that an optimiser with usual
tolerances stops early, which is what went wrong in the paper (arXiv 2404.10102). For given exponents E, A and B are a
linear problem, whose best solutions on a grid are the starts.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernels import UserError
from zoo.scaling.curves import Curve
from zoo.scaling.optima import Laws
from zoo.scaling.power import Numbers, PowerLaw

HUBER = 1e-3  # width of the robust loss, in log loss
EXPONENTS = np.linspace(0.05, 1.5, 30)  # α and β of the grid
STARTS, POINTS = 4, 40  # of the optimiser; of each curve
LEAST = 1e-6  # nats: a smaller term is none
STOP = {"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-9}


class Parametric(NamedTuple):
    """L(N, D) = E + A/N^α + B/D^β in nats.

    Attributes:
        E, A, B, alpha, beta: The constants.
        objective: The sum of the robust losses, in units of HUBER².
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float
    objective: float = 0.0

    def __call__(self, sizes: Numbers, tokens: Numbers) -> Numbers:
        return self.E + self.A * sizes**-self.alpha + self.B * tokens**-self.beta

    def laws(self, flops_per_product: float) -> Laws:
        """The optima of a model with C = flops_per_product · N · D.

        L(C) is E plus a power of C, as both terms fall by the same power at the optimum.
        """
        a, b = self.beta / (self.alpha + self.beta), self.alpha / (self.alpha + self.beta)
        ratio = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        size = PowerLaw(ratio * flops_per_product**-a, a)
        tokens = PowerLaw(flops_per_product**-b / ratio, b)
        falling = self.A * size.coefficient**-self.alpha + self.B * tokens.coefficient**-self.beta
        return Laws(PowerLaw(falling, -self.alpha * a, self.E), size, tokens)


# where N includes embeddings: the constants in arXiv 2203.15556, and those refitted by arXiv 2404.10102
CHINCHILLA = Parametric(E=1.69, A=406.4, B=410.7, alpha=0.3392, beta=0.2849)
CHINCHILLA_REPLICATED = Parametric(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
CHINCHILLA_FLOPS = 6.0  # per parameter and token


class Points(NamedTuple):
    """Points of training curves, N, D and L, each [P]."""

    sizes: Numbers
    tokens: Numbers
    losses: Numbers


def points_of(curves: Sequence[Curve]) -> Points:
    """Points of each curve, evenly over log tokens."""
    at = [np.geomspace(curve.tokens[0], curve.tokens[-1], POINTS) for curve in curves]
    losses = [np.interp(np.log(t), np.log(c.tokens), c.losses) for t, c in zip(at, curves, strict=True)]
    sizes = np.repeat([float(curve.size) for curve in curves], POINTS)
    return Points(sizes, np.concatenate(at), np.concatenate(losses))


def fit_parametric(points: Points, start: Parametric | None = None) -> Parametric:
    """Fit the constants to points, from a start or else from the best of a grid of exponents.

    Raises:
        UserError: There are fewer than three sizes or numbers of tokens, or the loss does not fall with both.
    """
    from scipy.optimize import minimize

    sizes, tokens, losses = points
    if min(len(np.unique(sizes)), len(np.unique(tokens))) < 3:
        raise UserError(
            f"it cannot be fitted, because five constants need at least three sizes and three numbers of tokens; there "
            f"are {len(np.unique(sizes))} sizes and {len(np.unique(tokens))} numbers of tokens"
        )
    # around their means, so that the constants are of order one
    n, d = np.log(sizes), np.log(tokens)
    n, d, mean_n, mean_d = n - n.mean(), d - d.mean(), n.mean(), d.mean()
    target = np.log(losses)

    def objective(x: Numbers) -> tuple[float, Numbers]:
        a, b, e, alpha, beta = x
        parts = np.stack([a - alpha * n, b - beta * d, np.full_like(n, e)])
        most = parts.max(0)
        weights = np.exp(parts - most)
        total = weights.sum(0)
        weights /= total
        r = (np.log(total) + most - target) / HUBER
        small = np.abs(r) <= 1
        slope = np.where(small, r, np.sign(r)) / HUBER
        gradient = [slope @ w for w in weights] + [-(slope * weights[0]) @ n, -(slope * weights[1]) @ d]
        return float(np.where(small, r**2 / 2, np.abs(r) - 0.5).sum()), np.array(gradient)

    if start is None:
        starts = _starts(n, d, losses)
    else:
        constants = start.A * np.exp(-start.alpha * mean_n), start.B * np.exp(-start.beta * mean_d), start.E
        starts = [[*np.log(np.maximum(constants, LEAST)), start.alpha, start.beta]]
    fits = [minimize(objective, x, jac=True, method="L-BFGS-B", options=STOP) for x in starts]
    best = min(fits, key=lambda result: result.fun)
    a, b, e, alpha, beta = best.x
    for name, exponent, height in (("size", alpha, a), ("number of tokens", beta, b)):
        if exponent <= 0 or height < np.log(LEAST):
            raise UserError(f"it cannot be fitted, because the loss does not fall with the {name} as a power of it")
    E, A, B = np.exp(e), np.exp(a + alpha * mean_n), np.exp(b + beta * mean_d)
    return Parametric(*map(float, (E, A, B, alpha, beta, best.fun)))


def _starts(n: Numbers, d: Numbers, losses: Numbers) -> list[list[float]]:
    """The best starts, as logs of A, B, E and the exponents: for given exponents the others are a linear problem."""
    from scipy.optimize import nnls

    candidates = []
    for alpha, beta in itertools.product(EXPONENTS, EXPONENTS):
        columns = np.stack([np.exp(-alpha * n), np.exp(-beta * d), np.ones_like(n)], 1) / losses[:, None]
        solution, error = nnls(columns, np.ones_like(losses))
        candidates.append((error, [*np.log(np.maximum(solution, LEAST)), alpha, beta]))
    return [start for _, start in sorted(candidates)[:STARTS]]
