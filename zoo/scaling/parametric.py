"""L(N, D) = E + A/N^α + B/D^β, the third approach of arXiv 2203.15556, fitted so that the optimiser arrives.

The robust loss is a sum over points, in units of its own width: averaged, it is so flat that an optimiser with usual
tolerances stops early, which is what went wrong in the paper (arXiv 2404.10102). For given exponents E, A and B are a
linear problem, whose best solutions on a grid are the starts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kernels import UserError
from zoo.scaling.curves import Curve
from zoo.scaling.optima import Laws
from zoo.scaling.power import Numbers, PowerLaw

HUBER = 1e-3  # width of the robust loss, in log loss
STARTS = 4
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


def fit_parametric(sizes: Numbers, tokens: Numbers, losses: Numbers) -> Parametric:
    """Fit the constants to points.

    Args:
        sizes, tokens, losses: N, D and L of each point, [P].

    Raises:
        UserError: Fewer than five points, or fewer than two sizes or numbers of tokens.
    """
    from scipy.optimize import minimize, nnls

    if len(losses) < 5 or len(np.unique(sizes)) < 2 or len(np.unique(tokens)) < 2:
        raise UserError(
            f"it cannot be fitted, because five constants need at least five points of two sizes and two numbers of "
            f"tokens; there are {len(losses)} points of {len(np.unique(sizes))} sizes"
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

    starts = []
    for alpha in np.linspace(0.05, 1.5, 30):
        for beta in np.linspace(0.05, 1.5, 30):
            columns = np.stack([np.exp(-alpha * n), np.exp(-beta * d), np.ones_like(n)], 1) / losses[:, None]
            solution, error = nnls(columns, np.ones_like(losses))
            starts.append((error, [*np.log(np.maximum(solution, 1e-6)), alpha, beta]))
    starts.sort(key=lambda start: start[0])
    found = [minimize(objective, start, jac=True, method="L-BFGS-B", options=STOP) for _, start in starts[:STARTS]]
    best = min(found, key=lambda result: result.fun)
    a, b, e, alpha, beta = best.x
    return Parametric(
        float(np.exp(e)),
        float(np.exp(a + alpha * mean_n)),
        float(np.exp(b + beta * mean_d)),
        float(alpha),
        float(beta),
        float(best.fun),
    )


def points_of(curves: Sequence[Curve], count: int = 40) -> tuple[Numbers, Numbers, Numbers]:
    """Sizes, tokens and losses of `count` points of each curve, evenly over log tokens."""
    sizes, tokens, losses = [], [], []
    for curve in curves:
        at = np.geomspace(curve.tokens[0], curve.tokens[-1], count)
        sizes.append(np.full(count, curve.size))
        tokens.append(at)
        losses.append(np.interp(np.log(at), np.log(curve.tokens), curve.losses))
    return np.concatenate(sizes), np.concatenate(tokens), np.concatenate(losses)
