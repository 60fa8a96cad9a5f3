import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from kernels.triton_exponential import exp2, sigmoid

# the interpreter warns of what overflows
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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


def test_powers_and_the_logistic_function():
    x = torch.linspace(-125, 125, 2048, device=DEVICE)  # powers that fp32 holds
    power, logistic = of(x)
    torch.testing.assert_close(power, x.double().exp2().float(), rtol=3e-7, atol=0)
    moderate = x.abs() < 80
    torch.testing.assert_close(logistic[moderate], x.double().sigmoid().float()[moderate], rtol=3e-6, atol=0)
    assert ((logistic >= 0) & (logistic <= 1)).all()


def test_powers_at_their_ends():
    x = torch.tensor([-torch.inf, -1e30, -300, 0, 300, 1e30, torch.inf, torch.nan], device=DEVICE)
    power, logistic = (y.tolist() for y in of(x))
    assert power[:7] == [0, 0, 0, 1, torch.inf, torch.inf, torch.inf]
    assert logistic[:7] == [0, 0, 0, 0.5, 1, 1, 1]
    assert power[7] != power[7]
    assert logistic[7] != logistic[7]
