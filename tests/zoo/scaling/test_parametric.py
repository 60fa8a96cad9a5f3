"""E + A/N^α + B/D^β: known constants come back."""

import numpy as np
import pytest

from kernels import UserError
from tests.zoo.scaling.curves import SIZES, ladder
from zoo.scaling.law import fit_law
from zoo.scaling.parametric import (
    CHINCHILLA,
    CHINCHILLA_FLOPS,
    CHINCHILLA_REPLICATED,
    HUBER,
    Parametric,
    fit_parametric,
    points_of,
)

pytest.importorskip("scipy")
PUBLISHED = {"hoffmann": CHINCHILLA, "replication": CHINCHILLA_REPLICATED}


@pytest.mark.parametrize("truth", PUBLISHED.values(), ids=PUBLISHED)
def test_constants_come_back_without_noise(truth: Parametric):
    actual = fit_parametric(points_of(ladder(truth)))
    assert actual[:5] == pytest.approx(truth[:5], rel=1e-3)
    for part, expected in zip(actual.laws(6.0), truth.laws(6.0), strict=True):
        assert part == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("law", PUBLISHED.values(), ids=PUBLISHED)
@pytest.mark.parametrize("flops", [1e19, 1e23])
def test_the_law_of_the_loss_is_the_least_loss_of_any_size(law: Parametric, flops: float):
    laws = law.laws(6.0)
    best = law(laws.size(flops), laws.tokens(flops))
    assert laws.loss(flops) == pytest.approx(best)
    sizes = np.geomspace(1e6, 1e12, 2001)
    losses = law(sizes, flops / (6 * sizes))
    assert best == pytest.approx(losses.min(), rel=1e-6)
    assert laws.size(flops) == pytest.approx(sizes[losses.argmin()], rel=0.01)


def test_a_few_wild_losses_hardly_move_the_fit():
    points = points_of(ladder(CHINCHILLA_REPLICATED))
    wild = points._replace(losses=points.losses * np.where(np.arange(len(points.losses)) < 10, 1.2, 1.0))
    assert fit_parametric(wild).alpha == pytest.approx(CHINCHILLA.alpha, abs=0.01)


def test_a_mean_in_place_of_the_sum_stops_early():
    """What went wrong in arXiv 2203.15556: an optimiser with usual tolerances finds an average flat."""
    from scipy.optimize import minimize

    points = points_of(ladder(CHINCHILLA))
    n, d, target = np.log(points.sizes), np.log(points.tokens), np.log(points.losses)

    def mean(x: np.ndarray) -> float:
        a, b, e, alpha, beta = x
        r = np.logaddexp(np.logaddexp(a - alpha * n, b - beta * d), e) - target
        huber = np.where(np.abs(r) <= HUBER, r**2 / 2, HUBER * (np.abs(r) - HUBER / 2))
        return float(huber.mean())

    early = minimize(mean, [5.0, 5.0, 0.5, 0.5, 0.5], method="L-BFGS-B").x
    actual = fit_parametric(points)
    assert abs(early[3] - CHINCHILLA.alpha) > 0.02  # that is the trap
    assert actual.alpha == pytest.approx(CHINCHILLA.alpha, abs=1e-4)
    assert actual.objective < 1e-3


def test_the_optima_that_chinchilla_prints():
    """Gopher's compute, 5.76e23 FLOPs, is best spent on about 40B parameters (arXiv 2203.15556, table 3: a=.46, b=.54);
    the replication has 20 tokens per parameter there, which Hoffmann's printed constants miss (arXiv 2404.10102)."""
    hoffmann, replication = (law.laws(CHINCHILLA_FLOPS) for law in PUBLISHED.values())
    assert (hoffmann.size.exponent, hoffmann.tokens.exponent) == pytest.approx((0.46, 0.54), abs=0.005)
    assert float(hoffmann.size(5.76e23)) == pytest.approx(40e9, rel=0.2)
    assert (replication.size.exponent, replication.tokens.exponent) == pytest.approx((0.51, 0.49), abs=0.005)
    assert float(replication.tokens(5.76e23) / replication.size(5.76e23)) == pytest.approx(20, rel=0.3)
    for laws in (hoffmann, replication):
        assert laws.balance == pytest.approx(1)
        assert 6 * laws.size(1e21) * laws.tokens(1e21) == pytest.approx(1e21)


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.nightly)])
def test_the_truth_lies_in_the_intervals(count: int):
    """Noise between runs, as of seeds, and within them: 95 % intervals of three seeds of six sizes."""
    truth = CHINCHILLA.laws(CHINCHILLA_FLOPS)
    inside = dict.fromkeys(truth._fields, 0)
    for draw in range(count):
        curves = ladder(CHINCHILLA, SIZES, points=40, seeds=3, between_runs=3e-3, within_runs=3e-3, rng=draw)
        law = fit_law(curves, "parametric", draws=40, seed=draw)
        for name in inside:
            low, high = law.interval(lambda laws, name=name: getattr(laws, name).exponent)
            assert high - low < 0.1  # an interval that says something
            inside[name] += low <= getattr(truth, name).exponent <= high
    assert min(inside.values()) >= 0.9 * count, inside


def test_too_little_is_refused():
    with pytest.raises(UserError, match="cannot be fitted, because five constants need at least three sizes"):
        fit_parametric(points_of(ladder(CHINCHILLA, SIZES[:2])))
    flat = Parametric(E=2.0, A=0.0, B=400.0, alpha=0.3, beta=0.3)
    with pytest.raises(UserError, match="the loss does not fall with the size"):
        fit_parametric(points_of(ladder(flat)))
