"""Mixtures of each token with the previous one: by the formula, and in Triton."""

import sys

import pytest
import torch
from torch import Tensor

import kernels
from kernels import token_shift

from .comparisons import DEVICE

pytestmark = pytest.mark.usefixtures("poison")

BACKENDS = ("torch", "triton")
BOUNDS = [0, 0, 3, 4, 9, 9]  # empty documents first, and last


def inputs(B: int, T: int, D: int, n: int, history: int = 0) -> tuple[Tensor, ...]:
    """x, shares beyond 0 and 1, and with a number of sequences the tokens before them."""
    shapes = [(B, T, D), (n, D), *([(history, D)] if history else [])]
    return tuple(2 * torch.randn(shape).to(DEVICE) for shape in shapes)


def results(tensors: tuple[Tensor, ...], backend: str, bounds: list[int] | None = None) -> list[Tensor]:
    """The mixtures and all gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device=DEVICE)
    with kernels.backend(backend):
        mixtures = token_shift(*leaves, cu_seqlens=cu_seqlens)
    generator = torch.Generator().manual_seed(0)
    arriving = [torch.randn(y.shape, generator=generator).to(y) for y in mixtures]
    return [*(y.detach() for y in mixtures), *torch.autograd.grad(mixtures, leaves, arriving)]


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_the_formula(backend: str):
    x, shares, before = (t.double() for t in inputs(2, 4, 3, 2, 2))
    previous = torch.cat([before[:, None], x[:, :-1]], 1)
    with kernels.backend(backend):
        for y, share in zip(token_shift(x, shares, before), shares, strict=True):
            torch.testing.assert_close(y, x + (previous - x) * share)
        torch.testing.assert_close(token_shift(x, shares)[1][:, 0], x[:, 0] * (1 - shares[1]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("continued", [False, True])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (2, 7, 3, 2), (3, 9, 300, 6), (1, 5, 16, 3), (2, 3, 5, 4), (1, 4, 8, 5)]
)
def test_outputs_and_gradients(sizes: tuple[int, ...], continued: bool, backend: str):
    tensors = inputs(*sizes, history=sizes[0] if continued else 0)
    torch.testing.assert_close(results(tensors, backend), results(tensors, "reference"))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_a_batch_without_rows(backend: str):
    first, second, dx, dshares = results(inputs(0, 5, 3, 2), backend)
    assert first.shape == second.shape == dx.shape == (0, 5, 3)
    assert torch.equal(dshares, torch.zeros_like(dshares))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("continued", [False, True])
def test_packed_documents(continued: bool, backend: str):
    tensors = inputs(1, 9, 5, 2, len(BOUNDS) - 1 if continued else 0)
    packed = results(tensors, backend, BOUNDS)
    torch.testing.assert_close(packed, results(tensors, "reference", BOUNDS))
    if continued:
        empty = [0, 4]
        assert not packed[-1][empty].any()
        assert packed[-1].any(1).sum() == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_rounded_once(backend: str):
    x, shares, before = inputs(2, 9, 33, 3, 2)
    x, before = x.bfloat16(), before.bfloat16()
    exact = results((x.float(), shares, before.float()), "reference")
    for result, expected, dtype in zip(
        results((x, shares, before), backend),
        exact,
        [torch.bfloat16] * 4 + [torch.float32, torch.bfloat16],
        strict=True,
    ):
        assert result.dtype == dtype
        torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_under_autocast_the_mixtures_have_the_dtype_of_the_next_layer(backend: str):
    tensors = inputs(1, 3, 8, 2)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert [y.dtype for y in results(tensors, backend)] == [torch.bfloat16] * 2 + [torch.float32] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_mixture_without_a_gradient(backend: str):
    x, shares = (t.requires_grad_() for t in inputs(2, 5, 8, 2))
    gradients = []
    for one in (backend, "reference"):
        with kernels.backend(one):
            y, _ = token_shift(x, shares)
        gradients.append(torch.autograd.grad(y.sin().sum(), (x, shares)))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixtures_are_recomputed_to_the_bit(backend: str):
    x, shares = (t.requires_grad_() for t in inputs(2, 5, 8, 3))
    gradients, bytes_saved = [], []
    for recompute in (False, True):
        saved: dict[int, int] = {}

        def note(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[t.data_ptr()] = t.numel()
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), kernels.backend(backend):
            if recompute:
                with kernels.recomputing():
                    z = sum(y.sin().sum() for y in token_shift(x * 1, shares))
            else:
                z = sum(y.sin().sum() for y in token_shift(x * 1, shares))
        gradients.append(torch.autograd.grad(z, (x, shares)))
        bytes_saved.append(sum(saved.values()))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert bytes_saved[1] < bytes_saved[0]


def test_more_mixtures_than_the_kernels_take():
    tensors = inputs(1, 3, 4, 7)
    torch.testing.assert_close(results(tensors, "torch"), results(tensors, "reference"))
    with kernels.backend("triton"), pytest.raises(kernels.UserError, match="which makes at most 6 mixtures"):
        token_shift(*tensors)


FLOATING = r"x: expected a floating \[B,T,D\] with at least one token, got torch.float32"


@pytest.mark.parametrize(
    ("shapes", "bounds", "message"),
    [
        (((2, 3), (1, 3)), None, f"{FLOATING} \\(2, 3\\)"),
        (((1, 0, 3), (1, 3)), None, f"{FLOATING} \\(1, 0, 3\\)"),
        (((1, 2, 3), (1, 4)), None, r"shares: expected \[n,3\], got shape \(1, 4\)"),
        (((1, 2, 3), (1, 3), (2, 3)), None, r"before: expected \[1, 3\], got shape \(2, 3\)"),
        (((1, 2, 3), (1, 3)), [0, 3], "cu_seqlens: ends at 3, but there are 2 tokens"),
        (((2, 2, 3), (1, 3)), [0, 2], "cu_seqlens: packed documents need a batch of 1 row, got 2"),
    ],
)
def test_arguments_that_do_not_fit(shapes: tuple, bounds: list[int] | None, message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        token_shift(*map(torch.zeros, shapes), cu_seqlens=None if bounds is None else torch.tensor(bounds))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bounds", [None, [0, 0, 1000, 1001, 4097]])
def test_on_device(bounds: list[int] | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        sys.modules["kernels.token_shift"].OP, "limits", None
    )  # they are not used on a GPU before this has passed
    x, shares, before = inputs(1 if bounds else 3, 4097, 1024, 6, 4 if bounds else 3)
    tensors = (x.to(dtype), shares, before)
    first, second = results(tensors, "triton", bounds), results(tensors, "triton", bounds)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(
        first, results((x.to(dtype).double(), shares.double(), before.double()), "torch", bounds), strict=True
    ):
        assert (one - other).norm() <= tolerance * other.norm()
