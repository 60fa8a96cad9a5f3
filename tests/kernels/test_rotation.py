"""Queries or keys with a bias of each head, rotated by angles: by the formula, in PyTorch and in Triton."""

import pytest
import torch
from torch import Tensor

import kernels
from kernels.rotation import OP, rotation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# B, T, G, H, E, K and P
SHAPES = [(2, 5, 1, 1, 1, 4, 2), (1, 33, 1, 4, 1, 7, 2), (2, 17, 2, 6, 3, 16, 8), (1, 18, 3, 3, 1, 128, 32)]
LARGE = [(4, 1023, 1, 32, 1, 128, 32), (1, 3001, 2, 8, 4, 64, 32), (2, 65, 8, 8, 1, 512, 256)]
MESSAGES = {
    "bias": r"^bias: shape \(3, 4\) does not fit 2 x 4 channels of x with 1 subheads",
    "angles": r"^angles: expected \[1, 5, 4, at most 2\], got \(1, 5, 4, 3\)",
}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that reading unwritten memory shows."""
    module = pytest.importorskip("kernels.rotation.gpu.op")
    allocate = module.new
    monkeypatch.setattr(module, "new", lambda *arguments, **options: allocate(*arguments, **options).fill_(torch.nan))


def inputs_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    B, T, G, H, E, K, P = shape
    wide = torch.randn(B, T, G * E, K + 3, device=DEVICE).to(dtype)
    return wide[..., 1:-2], torch.randn(H * E, K, device=DEVICE), 4 * torch.randn(B, T, H * E, P, device=DEVICE)


def results(inputs: tuple[Tensor, ...], subheads: int, backend: str, recompute: bool = False) -> list[Tensor]:
    """y and the gradients of x, the bias and the angles."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    with kernels.backend(backend), kernels.recomputing(recompute):
        y = rotation(*leaves, subheads=subheads)
        loss = y.pow(2)  # which saves y
    arriving = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    return [y.detach(), *torch.autograd.grad(loss, leaves, arriving)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients(shape: tuple[int, ...], backend: str):
    inputs = inputs_of(shape)
    expected = results(inputs, shape[4], "reference")
    torch.testing.assert_close(results(inputs, shape[4], backend), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_recomputed_results_have_the_same_gradients(backend: str, monkeypatch: pytest.MonkeyPatch):
    run, calls = OP.load(backend), []
    monkeypatch.setitem(OP.implementations, backend, lambda *args: calls.append(args) or run(*args))
    inputs = inputs_of(SHAPES[2])
    expected = results(inputs, 3, backend)
    assert len(calls) == 1
    assert all(map(torch.equal, results(inputs, 3, backend, recompute=True), expected))
    assert len(calls) == 3  # once more in the backward pass


def test_gradients_are_those_of_finite_differences():
    inputs = [t.double().requires_grad_() for t in inputs_of((1, 3, 2, 4, 2, 5, 2))]
    assert torch.autograd.gradcheck(lambda *args: rotation(*args, subheads=2), inputs)


def test_a_quarter_turn():
    x = torch.arange(1.0, 6.0).view(1, 1, 1, 5)
    expected = torch.tensor([-2.0, 1.0, 3.0, 4.0, 5.0]).view(1, 1, 1, 5)
    torch.testing.assert_close(rotation(x, torch.zeros(1, 5), torch.full((1, 1, 1, 1), 0.25)), expected)


def test_half_precision_is_rounded_once():
    inputs = inputs_of(SHAPES[2], torch.bfloat16)
    exact = results(tuple(t.float() for t in inputs), 3, "reference")
    actual = results(inputs, 3, "triton")
    assert [result.dtype for result in actual] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for result, wide in zip(actual, exact, strict=True):
        assert (result.float() - wide).norm() < 1e-2 * wide.norm()
    with kernels.backend("triton"):
        y = rotation(*inputs, subheads=3)
    torch.testing.assert_close(y, exact[0].bfloat16(), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
def test_angles_in_half_precision_are_multiplied_in_fp32(backend: str):
    x, bias, angles = inputs_of(SHAPES[2])
    inputs = x.bfloat16(), bias, angles.bfloat16()
    exact = results(tuple(t.double() for t in inputs), 3, "torch")
    for result, wide in zip(results(inputs, 3, backend), exact, strict=True):
        assert (result - wide).norm() < 1e-2 * wide.norm()


@pytest.mark.slow
def test_the_op_is_registered_properly(monkeypatch: pytest.MonkeyPatch):
    results(inputs_of(SHAPES[1]), 1, "triton")
    monkeypatch.undo()
    leaves = [t.clone().requires_grad_() for t in inputs_of(SHAPES[1])]
    torch.library.opcheck(torch.ops.token_mixer_zoo.rotation, (*leaves, 1, False))


@pytest.mark.parametrize("name", MESSAGES)
def test_arguments_that_do_not_fit(name: str):
    arguments = {"x": torch.zeros(1, 5, 2, 4), "bias": torch.zeros(4, 4), "angles": torch.zeros(1, 5, 4, 2)}
    wrong = {"bias": torch.zeros(3, 4), "angles": torch.zeros(1, 5, 4, 3)}
    with pytest.raises(ValueError, match=MESSAGES[name]):
        rotation(**arguments | {name: wrong[name]})


def test_integers_are_not_rotated():
    with pytest.raises(ValueError, match=r"^x: expected a floating dtype, got torch.int64"):
        rotation(torch.zeros(1, 5, 2, 4).long(), torch.zeros(4, 4), torch.zeros(1, 5, 4, 2))


def test_subheads_below_one():
    with pytest.raises(ValueError, match=r"^subheads: must be at least 1, got 0"):
        rotation(torch.zeros(1, 5, 2, 4), torch.zeros(4, 4), torch.zeros(1, 5, 4, 2), subheads=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", LARGE)
def test_on_device(shape: tuple[int, ...], dtype: torch.dtype):
    inputs = inputs_of(shape, dtype)
    exact = results(tuple(t.float() for t in inputs), shape[4], "reference")
    for result, wide in zip(results(inputs, shape[4], "triton"), exact, strict=True):
        error = (result.float() - wide).norm() / wide.norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)
