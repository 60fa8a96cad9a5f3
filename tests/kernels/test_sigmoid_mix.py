"""A mixture of two streams by the sigmoid of a gate: by the formula, and in Triton."""

import sys

import pytest
import torch
from torch import Tensor

import kernels
from kernels import sigmoid_mix

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that reading unwritten memory shows."""
    module = pytest.importorskip("kernels.sigmoid_mix.gpu.op")
    allocate = module.new
    monkeypatch.setattr(module, "new", lambda *sizes, **options: allocate(*sizes, **options).fill_(torch.nan))


def inputs(*shape: int) -> list[Tensor]:
    """Two streams, a gate that is columns of a projection, some of it extreme, and its bias."""
    x, other = torch.randn(2, *shape)
    gate = 3 * torch.randn(*shape[:-1], shape[-1] + 3)[..., 2:-1]
    gate[..., 0] = 100.0  # an exponential would overflow
    return [t.to(DEVICE) for t in (x, other, gate, torch.randn(shape[-1]))]


def results(tensors: list[Tensor], backend: str) -> list[Tensor]:
    """y and all gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    with kernels.backend(backend):
        y = sigmoid_mix(*leaves)
    arriving = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, arriving)]


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_the_formula(backend: str):
    x, other, gate, bias = (t.double() for t in inputs(2, 5, 7))
    share = 1 / (1 + torch.exp(-gate - bias))
    with kernels.backend(backend):
        torch.testing.assert_close(sigmoid_mix(x, other, gate, bias), x * (1 - share) + other * share)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 7), (3, 70, 300)])
def test_outputs_and_gradients(shape: tuple[int, ...], backend: str):
    tensors = inputs(*shape)
    torch.testing.assert_close(results(tensors, backend), results(tensors, "reference"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_rounded_once(backend: str):
    *streams, bias = inputs(2, 4, 33)
    low = [t.bfloat16() for t in streams]
    exact = results([*(t.float() for t in low), bias], "reference")
    rounded = results([*low, bias], backend)
    assert [t.dtype for t in rounded] == [torch.bfloat16] * 4 + [torch.float32]
    for result, expected in zip(rounded, exact, strict=True):
        assert (result - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_repeat_to_the_bit(backend: str):
    tensors = inputs(2, 70, 40)
    pairs = zip(results(tensors, backend), results(tensors, backend), strict=True)
    assert all(torch.equal(first, second) for first, second in pairs)


@pytest.mark.slow
def test_the_op_is_registered_properly(monkeypatch: pytest.MonkeyPatch):
    tensors = inputs(2, 3, 8)
    results(tensors, "triton")
    monkeypatch.undo()
    args = [t.clone().requires_grad_() for t in tensors]
    torch.library.opcheck(torch.ops.token_mixer_zoo.sigmoid_mix, (*args, False))


def test_arguments_that_do_not_fit():
    x, other, gate, bias = inputs(2, 3)
    with pytest.raises(ValueError, match=r"^gate: expected the shape of x, \(2, 3\), got \(2, 2\)"):
        sigmoid_mix(x, other, gate[:, :2], bias)
    with pytest.raises(ValueError, match=r"^x: expected a floating dtype, got torch.int64"):
        sigmoid_mix(x.long(), other, gate, bias)
    with pytest.raises(ValueError, match=r"^bias: expected \[3\], got shape \(2,\)"):
        sigmoid_mix(x, other, gate, bias[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_device(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        sys.modules["kernels.sigmoid_mix"].OP, "limits", None
    )  # they are not used on a GPU before this has passed
    *streams, bias = inputs(2, 4097, 1024)
    tensors = [*(t.to(dtype) for t in streams), bias]
    first, second = results(tensors, "triton"), results(tensors, "triton")
    exact = results([t.double() for t in tensors], "torch")
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other, expected in zip(first, second, exact, strict=True):
        assert torch.equal(one, other)
        assert (one - expected).norm() <= tolerance * expected.norm()
