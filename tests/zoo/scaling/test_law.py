"""Laws of one mixer by the envelope and by IsoFLOP curves, offsets, crossings, refusals."""

import numpy as np
import pytest

from kernels import UserError
from tests.zoo.scaling.curves import DENSE, SIZES, ladder
from zoo.scaling.curves import PF_DAY
from zoo.scaling.law import crossing, fit_law
from zoo.scaling.optima import envelope, isoflop, offset
from zoo.scaling.parametric import CHINCHILLA, CHINCHILLA_REPLICATED, Parametric
from zoo.scaling.power import PowerLaw, fit_falling_power_with_offset, fit_power

pytest.importorskip("scipy")
PURE = Parametric(E=0.0, A=20.0, B=20.0, alpha=0.1, beta=0.1)  # its optimal loss is a power law


def test_power_laws_come_back():
    x = np.geomspace(1e17, 1e24, 40)
    assert fit_power(x, 3.7 * x**-0.08) == pytest.approx((3.7, -0.08, 0))
    assert fit_falling_power_with_offset(x, 1.7 + 900 * x**-0.15) == pytest.approx((900, -0.15, 1.7), rel=1e-5)


@pytest.mark.parametrize("truth", [CHINCHILLA, CHINCHILLA_REPLICATED])
@pytest.mark.parametrize("method", ["envelope", "isoflop"])
def test_dense_ladders_give_the_exponents(truth: Parametric, method: str):
    law = fit_law(ladder(truth, DENSE, points=400), method, draws=0)
    expected = truth.laws(6.0)
    assert law.laws.size.exponent == pytest.approx(expected.size.exponent, abs=0.015)
    assert law.laws.tokens.exponent == pytest.approx(expected.tokens.exponent, abs=0.015)
    assert law.laws.balance == pytest.approx(1, abs=1e-6)
    assert law.interval(lambda laws: laws.size.exponent) is None  # without draws


@pytest.mark.parametrize("read", [envelope, isoflop])
def test_an_offset_is_told_from_none(read):
    with_one = offset(read(ladder(CHINCHILLA, DENSE)))
    assert with_one.errors[1] < with_one.errors[0] / 3
    assert with_one.with_offset.offset == pytest.approx(CHINCHILLA.E, rel=0.05)
    without = offset(read(ladder(PURE, DENSE, between_runs=1e-4)))
    assert without.with_offset.offset < 0.1
    assert without.errors[0] < 2 * without.errors[1] + 1e-3


def test_every_method_has_intervals_with_five_runs():
    curves = ladder(CHINCHILLA, np.geomspace(1e7, 1e9, 5), between_runs=2e-3, within_runs=2e-3)
    for method in ("envelope", "isoflop", "parametric"):
        law = fit_law(curves, method, draws=20)
        low, high = law.interval(lambda laws: laws.loss.exponent)
        assert low < law.laws.loss.exponent < high


def test_what_cannot_be_fitted_says_why():
    reasons = {
        "3 sizes of model were trained; 4 are needed": ladder(CHINCHILLA, SIZES[:3]),
        "only 4.0 times the parameters of the smallest": ladder(CHINCHILLA, np.geomspace(1e7, 4e7, 4)),
        "fewer than two sizes between the smallest and the largest are the best": ladder(
            CHINCHILLA, SIZES, tokens=(1e7, 3e7)
        ),
    }
    for reason, curves in reasons.items():
        with pytest.raises(UserError, match=f"M: it cannot be fitted, because .*{reason}"):
            fit_law(curves, "envelope")
    with pytest.raises(UserError, match=r"only \d of 12 IsoFLOP curves have their optimum between"):
        fit_law(ladder(CHINCHILLA, np.geomspace(1e10, 1e12, 6), tokens=(1e7, 3e9)), "isoflop")
    with pytest.raises(UserError, match="at no amount of compute 4 sizes have got there"):
        fit_law(ladder(CHINCHILLA, SIZES, tokens=(1e7, 3e7)), "isoflop")
    with pytest.raises(UserError, match="lies outside of the sizes that were trained"):
        fit_law(ladder(CHINCHILLA, np.geomspace(1e10, 1e12, 6), tokens=(1e7, 3e9)), "parametric")


def test_laws_that_do_not_cross():
    one, other = CHINCHILLA.laws(6.0), CHINCHILLA._replace(E=2.0).laws(6.0)
    assert crossing(one, other, (PF_DAY, 10 * PF_DAY)) is None
    assert PowerLaw(2.0, -1.0, 1.0)(2.0) == 2.0
