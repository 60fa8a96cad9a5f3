import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from kernels.gpu.tiles import exp2, sigmoid

from ..places import PLACES

# the interpreter warns of what overflows
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@triton.jit
def powers(x, power, logistic, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    here = tl.load(x + at)
    tl.store(power + at, exp2(here))
    tl.store(logistic + at, sigmoid(here))


def of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    power, logistic = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    powers[(1,)](x, power, logistic, BLOCK=len(x))
    return power, logistic


@pytest.mark.parametrize("where", PLACES)
def test_powers_and_the_logistic_function(where: str):
    x = torch.linspace(-125, 125, 2048, device=where)  # powers that fp32 holds
    power, logistic = of(x)
    torch.testing.assert_close(power, x.double().exp2().float(), rtol=3e-7, atol=0)
    assert ((logistic >= 0) & (logistic <= 1)).all()
    # e^x is a power of two of a product, which rounds: the larger x, the fewer of its bits lie behind the point
    expected = x.double().sigmoid()
    error = (logistic.double() - expected).abs() / expected
    assert (error < 2**-21 * (1 + x.abs()))[x > -80].all()


@pytest.mark.parametrize("where", PLACES)
def test_powers_at_their_ends(where: str):
    x = torch.tensor([-torch.inf, -1e30, -300, 0, 300, 1e30, torch.inf, torch.nan], device=where)
    power, logistic = (y.tolist() for y in of(x))
    assert power[:7] == [0, 0, 0, 1, torch.inf, torch.inf, torch.inf]
    assert logistic[:7] == [0, 0, 0, 0.5, 1, 1, 1]
    assert power[7] != power[7]
    assert logistic[7] != logistic[7]
