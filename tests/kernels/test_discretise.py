"""Decays from their raw numbers: by the formula, and in Triton."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that reading unwritten memory shows."""
    module = pytest.importorskip("kernels.delta_gates.gpu.op")
    allocate = module.new
    monkeypatch.setattr(module, "new", lambda *arguments, **options: allocate(*arguments, **options).fill_(torch.nan))


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    a = {"a": 5 * torch.randn(shape), "A_log": torch.randn(shape[-1]), "dt_bias": torch.randn(shape[-1])}
    extreme = torch.tensor([100.0, -100.0, 0.0])  # a softplus of exponentials would overflow
    a["a"].view(-1)[:3] = extreme[: a["a"].numel()]
    return {name: x.to(DEVICE, dtype if name == "a" else None) for name, x in a.items()}


def results(a: dict[str, Tensor], backend: str, through: str = "both") -> dict[str, Tensor]:
    """Both results and all gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    with kernels.backend(backend):
        log_decay, dt = kernels.discretise(**leaves)
    outputs = {"both": [log_decay, dt], "log_decay": [log_decay], "dt": [dt]}[through]
    generator = torch.Generator().manual_seed(0)
    arriving = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), arriving, materialize_grads=True)
    return {"log_decay": log_decay.detach(), "dt": dt.detach(), **dict(zip(a, gradients, strict=True))}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    for name, x in expected.items():
        error = float((actual[name].double() - x.double()).norm() / x.double().norm().clamp(min=1e-30))
        assert error <= limit, f"{name}: {error:.2g}"


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_the_formula(backend: str):
    a = inputs(3, 4, 5)
    with kernels.backend(backend):
        log_decay, dt = kernels.discretise(**a)
    torch.testing.assert_close(dt, F.softplus(a["a"] + a["dt_bias"]))
    torch.testing.assert_close(log_decay, -a["A_log"].exp() * dt)
    assert dt.dtype == torch.float32
    assert kernels.discretise(a["a"].double(), a["A_log"], a["dt_bias"])[0].dtype == torch.float64


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("through", ["both", "log_decay", "dt"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 70, 5), (3, 1000, 8), (40, 100)])
def test_triton(shape: tuple[int, ...], through: str):
    a = inputs(*shape)
    assert_close(results(a, "triton", through), results(a, "reference", through), 1e-5)


@interpreted
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_small_steps_keep_their_digits(backend: str):
    a = torch.linspace(-40, 5, 91, device=DEVICE)[:, None]
    with kernels.backend(backend):
        log_decay, dt = kernels.discretise(a, torch.zeros(1, device=DEVICE), torch.zeros(1, device=DEVICE))
    expected = F.softplus(a.double(), threshold=100)
    assert ((dt - expected) / expected).abs().max() < 1e-5
    assert torch.equal(log_decay, -dt)


def test_a_view_in_half_precision():
    fused = torch.randn(2, 30, 20).bfloat16()
    a = {"a": fused[..., 3:11], "A_log": torch.randn(8), "dt_bias": torch.randn(8)}
    actual, expected = results(a, "triton"), results(a, "reference")
    assert [x.dtype for x in actual.values()] == [x.dtype for x in expected.values()]
    assert_close(actual, expected, 1e-2)


@interpreted
@pytest.mark.parametrize("low", ["A_log", "dt_bias"])
def test_parameters_of_different_precision(low: str):
    a = inputs(2, 70, 8)
    a[low] = a[low].bfloat16()
    actual, expected = results(a, "triton"), results(a, "reference")
    assert actual[low].dtype == torch.bfloat16
    del actual[low], expected[low]
    assert_close(actual, expected, 1e-5)


@interpreted
def test_the_op_is_registered_properly(monkeypatch: pytest.MonkeyPatch):
    arguments = [x.requires_grad_() for x in inputs(3, 4).values()]
    results(inputs(3, 4), "triton")
    monkeypatch.undo()
    torch.library.opcheck(torch.ops.token_mixer_zoo.delta_gates, (*arguments, None, None, 1.0, 0.0, False))


def test_misfits():
    with pytest.raises(ValueError, match=r"^A_log: expected \[3\], got shape \(2,\)"):
        kernels.discretise(torch.zeros(4, 3), torch.zeros(2), torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_device(dtype: torch.dtype):
    a = inputs(4, 4097, 48, dtype=dtype)
    exact = {name: x.float() for name, x in a.items()}
    actual, expected = results(a, "triton"), results(exact, "reference")
    assert_close(actual, expected, 1e-2 if dtype == torch.bfloat16 else 1e-5)
    repeated = results(a, "triton")
    assert all(torch.equal(actual[name], repeated[name]) for name in actual)
