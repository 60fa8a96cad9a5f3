"""Power laws of one variable, with and without an offset."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernels import UserError

Numbers = NDArray[np.float64]
EXPONENTS = (1e-3, 3.0)  # where the exponent of a law with an offset is searched


class PowerLaw(NamedTuple):
    """y = offset + coefficient · x^exponent."""

    coefficient: float
    exponent: float
    offset: float = 0.0

    def __call__(self, x: ArrayLike) -> Numbers:
        return self.offset + self.coefficient * np.asarray(x, np.float64) ** self.exponent


def fit_power(x: ArrayLike, y: ArrayLike) -> PowerLaw:
    """Least squares of log y over log x: the form of arXiv 2406.16690, without an offset.

    Raises:
        UserError: There are fewer than two different x.
    """
    u, v = np.log(np.asarray(x, np.float64)), np.log(np.asarray(y, np.float64))
    if np.ptp(u) == 0:
        raise UserError("a power law cannot be fitted, because all points have the same x")
    centred = u - u.mean()
    exponent = float(centred @ (v - v.mean()) / (centred @ centred))
    return PowerLaw(float(np.exp(v.mean() - exponent * u.mean())), exponent)


def fit_falling_power_with_offset(x: ArrayLike, y: ArrayLike) -> PowerLaw:
    """Least squares of the relative error of ε + β·x^−α, with ε ≥ 0 and β ≥ 0, such as a loss over compute.

    Variable projection: for each α the best ε and β are a linear problem, so only α is searched.

    Raises:
        UserError: There are fewer than three different x.
    """
    from scipy.optimize import minimize_scalar, nnls

    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(np.unique(x)) < 3:
        raise UserError("a power law with an offset cannot be fitted, because it needs points at three different x")
    unit = np.exp(np.log(x).mean())  # so that neither column is many orders of magnitude larger

    def solve(exponent: float) -> tuple[Numbers, float]:
        columns = np.stack([np.ones_like(x), (x / unit) ** -exponent], 1) / y[:, None]
        return nnls(columns, np.ones_like(y))

    grid = np.geomspace(*EXPONENTS, 60)
    best = int(np.argmin([solve(exponent)[1] for exponent in grid]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    search = {"bounds": (low, high), "method": "bounded", "options": {"xatol": 1e-10}}
    exponent = float(minimize_scalar(lambda a: solve(a)[1], **search).x)
    offset, coefficient = solve(exponent)[0]
    return PowerLaw(float(coefficient * unit**exponent), -exponent, float(offset))
