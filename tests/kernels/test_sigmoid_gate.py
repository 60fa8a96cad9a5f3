"""The sigmoid of a gate, alone or times a stream: by the formula, and in Triton."""

import pytest
import torch
from torch import Tensor

import kernels
from kernels.sigmoid_gate import sigmoid_gate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that reading unwritten memory shows."""
    module = pytest.importorskip("kernels.sigmoid_gate.gpu.op")
    allocate = module.new
    monkeypatch.setattr(module, "new", lambda *arguments, **options: allocate(*arguments, **options).fill_(torch.nan))


def results(gate: Tensor, x: Tensor | None, backend: str) -> list[Tensor]:
    """y and all gradients."""
    leaves = [t.detach().requires_grad_() for t in (gate, x) if t is not None]
    with kernels.backend(backend):
        y = sigmoid_gate(*leaves, largest=2.0)
    arriving = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, arriving)]


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_the_formula(backend: str):
    gate, x = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    with kernels.backend(backend):
        torch.testing.assert_close(sigmoid_gate(gate, x), x / (1 + torch.exp(-gate)))
        torch.testing.assert_close(sigmoid_gate(gate, largest=2), 2 / (1 + torch.exp(-gate)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 7), (3, 2, 1030)])
def test_outputs_and_gradients(shape: tuple[int, ...], alone: bool, backend: str):
    x, wide = torch.randn(shape, device=DEVICE), torch.randn(*shape[:-1], shape[-1] + 3, device=DEVICE)
    gate = wide[..., 1:-2]  # columns of a projection
    inputs = (gate, None if alone else x)
    torch.testing.assert_close(results(*inputs, backend), results(*inputs, "reference"))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_rounded_once(backend: str, alone: bool):
    gate, x = 4 * torch.randn(2, 4, 33, device=DEVICE).bfloat16()  # of shares near 1, bf16 would lose the slope
    inputs = (gate, None if alone else x)
    wide = [None if t is None else t.float() for t in inputs]
    for result, exact in zip(results(*inputs, backend), results(*wide, "reference"), strict=True):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, exact.bfloat16(), rtol=1e-2, atol=1e-6)


@pytest.mark.slow
def test_the_op_is_registered_properly(monkeypatch: pytest.MonkeyPatch):
    results(*torch.randn(2, 3, 8, device=DEVICE), "triton")
    monkeypatch.undo()
    gate, x = (t.clone().requires_grad_() for t in torch.randn(2, 3, 8, device=DEVICE))
    for factor in (x, None):
        torch.library.opcheck(torch.ops.token_mixer_zoo.sigmoid_gate, (gate, factor, 2.0, False))


def test_a_factor_of_another_shape():
    with pytest.raises(ValueError, match=r"^x: expected the shape of gate, \(2, 3\), got \(2, 4\)"):
        sigmoid_gate(torch.zeros(2, 3), torch.zeros(2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_device(dtype: torch.dtype):
    gate, x = torch.randn(2, 4, 4097, 1024, device="cuda").to(dtype)
    for inputs in ((gate, x), (gate, None)):
        wide = [None if t is None else t.float() for t in inputs]
        for one, other in zip(results(*inputs, "triton"), results(*wide, "reference"), strict=True):
            torch.testing.assert_close(one.float(), other, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
