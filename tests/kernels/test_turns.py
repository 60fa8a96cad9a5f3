"""Angles that add up along time: by a loop, in PyTorch and in Triton."""

import pytest
import torch
from torch import Tensor

import kernels
from kernels.turns import turns

from .comparisons import DEVICE

pytestmark = pytest.mark.usefixtures("poison")

BACKENDS = ("torch", "triton")
# boundaries of documents: inside a block, at its ends, empty ones, and longer than two blocks
PACKED = [None, [0, 5, 5, 32, 64, 65, 150], [0, 0, 149, 150], [0, 31, 33, 96, 96, 97, 150]]


def inputs_of(B: int, T: int, H: int, P: int) -> tuple[Tensor, Tensor]:
    wide = torch.randn(B, T, P + 2, device=DEVICE)
    return wide[..., 1:-1], 8 * torch.rand(B, T, H, device=DEVICE)


def results(inputs: tuple[Tensor, Tensor], cu_seqlens: Tensor | None, backend: str) -> list[Tensor]:
    """Both sums, and the gradients of the rates and the steps."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    with kernels.backend(backend):
        sums = turns(*leaves, cu_seqlens)
    generator = torch.Generator().manual_seed(0)
    loss = sum((y * torch.randn(y.shape, generator=generator).to(y)).sum() for y in sums)
    return [*(y.detach() for y in sums), *torch.autograd.grad(loss, leaves)]


def bounds_of(bounds: list[int] | None) -> Tensor | None:
    return None if bounds is None else torch.tensor(bounds, device=DEVICE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bounds", PACKED)
def test_sums_are_exact_and_gradients_are_close(bounds: list[int] | None, backend: str):
    inputs = inputs_of(2 if bounds is None else 1, 150, 3, 5)
    actual, expected = (results(inputs, bounds_of(bounds), each) for each in (backend, "reference"))
    assert all(map(torch.equal, actual[:2], expected[:2]))
    torch.testing.assert_close(actual[2:], expected[2:], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bounds", PACKED)
def test_blocks_that_are_added_up_in_several_turns(bounds: list[int] | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kernels.turns.gpu.op.SPAN", 2)
    test_sums_are_exact_and_gradients_are_close(bounds, "triton")


@pytest.mark.parametrize("T", [1, 31, 32, 33])
def test_short_sequences(T: int):
    inputs = inputs_of(2, T, 1, 4)
    actual, expected = (results(inputs, None, backend) for backend in ("triton", "reference"))
    assert all(map(torch.equal, actual[:2], expected[:2]))
    torch.testing.assert_close(actual[2:], expected[2:], rtol=1e-4, atol=1e-4)


def test_sums_beyond_many_turns():
    inputs = torch.full((1, 100, 2), 0.999), torch.full((1, 100, 1), 100.0)
    expected = (torch.arange(1, 101)[:, None].double() * inputs[0][0].double() * 50).remainder(1).float()
    for backend in BACKENDS:
        y = results(tuple(x.to(DEVICE) for x in inputs), None, backend)[0]
        torch.testing.assert_close(y[0, :, 0].cpu(), expected, rtol=0, atol=1e-4)


def test_one_result_alone_has_a_gradient():
    rates, steps = (x.detach().requires_grad_() for x in inputs_of(1, 40, 2, 3))
    for index in (0, 1):
        gradients = []
        for backend in ("triton", "reference"):
            with kernels.backend(backend):
                gradients.append(torch.autograd.grad(turns(rates, steps)[index].sum(), [rates, steps]))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_op_is_registered_properly():
    inputs = inputs_of(1, 40, 2, 3)
    results(inputs, None, "triton")
    leaves = [t.clone().requires_grad_() for t in inputs]
    torch.library.opcheck(torch.ops.token_mixer_zoo.turns, (*leaves, bounds_of([0, 7, 40]), False))


def test_arguments_that_do_not_fit():
    with pytest.raises(ValueError, match=r"^rates: expected \[B,T,P\] with at least one token, got shape \(1, 0, 2\)"):
        turns(torch.zeros(1, 0, 2), torch.zeros(1, 0, 2))
    with pytest.raises(ValueError, match=r"^steps: expected \[1, 3, H\] in torch.float32, got \(1, 4, 2\) in"):
        turns(torch.zeros(1, 3, 2), torch.zeros(1, 4, 2))
    with pytest.raises(ValueError, match=r"^rates: expected fp32 or fp64, got torch.bfloat16"):
        turns(*torch.zeros(2, 1, 3, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_angles_that_are_not_finite_are_not_hidden(wrong: float, backend: str):
    rates, steps = torch.rand(1, 40, 2, device=DEVICE), torch.rand(1, 40, 1, device=DEVICE)
    rates[0, 7, 1] = wrong
    with kernels.backend(backend):
        total, _ = turns(rates, steps)
    assert total[0, 7, 0, 1].isnan()
    assert total[0, :7].isfinite().all()


def test_deterministic_mode_adds_gradients_in_pytorch():
    inputs = inputs_of(1, 40, 2, 3)
    with kernels.deterministic(), kernels.implementations() as ran:
        expected = results(inputs, None, "triton")
    assert "turns" not in ran
    assert all(map(torch.equal, expected, results(inputs, None, "torch")))


def test_more_angles_than_fit_into_registers():
    rates, steps = torch.zeros(1, 2, 65), torch.zeros(1, 2, 65)
    with kernels.backend("triton"), pytest.raises(kernels.UserError, match="at most 8192 angles of a token"):
        turns(rates, steps)


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [None, [0, 1, 1, 700, 2049, 4000]])
def test_on_device(bounds: list[int] | None):
    inputs = inputs_of(2 if bounds is None else 1, 4000, 32, 32)
    actual, expected = (results(inputs, bounds_of(bounds), each) for each in ("triton", "torch"))
    assert all(map(torch.equal, actual[:2], expected[:2]))
    for one, other in zip(actual[2:], expected[2:], strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()
