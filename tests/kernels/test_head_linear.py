"""A linear map for each head: against a loop, its memory, and what it saves."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE


def loop(x: Tensor, weight: Tensor) -> Tensor:
    """Token by token, head by head, in at least fp32."""
    x, weight = kernels.at_least_fp32(x), kernels.at_least_fp32(weight)
    tokens = [torch.stack([x[b, t, h] @ weight[h] for h in range(len(weight))]) for b, t in places(x)]
    return torch.stack(tokens).view(*x.shape[:3], -1)


def places(x: Tensor) -> list[tuple[int, int]]:
    return [(b, t) for b in range(x.shape[0]) for t in range(x.shape[1])]


def leaves(B: int, T: int, H: int, K: int, N: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = (B, T, H, K), (H, K, N)
    x, weight = (torch.randn(size, device=DEVICE).to(dtype).requires_grad_() for size in sizes)
    return x, weight


def results(run: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> list[Tensor]:
    y = run(x, weight)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, (x, weight), dy)]


LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("shape", [(2, 5, 3, 4, 12), (1, 37, 1, 7, 3), (3, 1, 2, 16, 16)])
@pytest.mark.parametrize("dtype", LIMITS)
def test_it_is_one_map_for_each_head(shape: tuple[int, ...], dtype: torch.dtype):
    x, weight = leaves(*shape, dtype=dtype)
    for actual, expected in zip(results(kernels.head_linear, x, weight), results(loop, x, weight), strict=True):
        assert actual.dtype == dtype
        assert actual.is_contiguous()
        error = (actual.double() - expected.double()).norm() / expected.double().norm()
        assert error <= LIMITS[dtype]


def test_streams_with_gaps():
    """Parts of one projection lie side by side in memory."""
    whole = torch.randn(2, 5, 3 * 4 + 6, device=DEVICE, requires_grad=True)
    weight = torch.randn(3, 4, 8, device=DEVICE)

    def gradient(run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        part, rest = whole.split([12, 6], -1)
        total = run(part.unflatten(-1, (3, 4)), weight).square().sum() + rest.sum()
        return torch.autograd.grad(total, whole)[0]

    torch.testing.assert_close(gradient(kernels.head_linear), gradient(loop))


def test_autocast_decides_the_dtype_of_the_product():
    x, weight = leaves(2, 5, 3, 4, 12)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = kernels.head_linear(x, weight)
    assert y.dtype == torch.bfloat16
    dx, dweight = torch.autograd.grad(y.float().sum(), (x, weight))
    assert dx.dtype == dweight.dtype == torch.float32


def test_the_result_is_computed_again_instead_of_saved():
    x, weight = leaves(2, 5, 3, 4, 12)
    expected = results(lambda x, w: kernels.head_linear(x, w).sin(), x, weight)
    with kernels.recomputing():
        y = kernels.head_linear(x, weight)
        z = y.sin()
    assert z.grad_fn._saved_self.data_ptr() != y.data_ptr()  # made anew for whoever reads it
    dy = torch.randn(z.shape, generator=torch.Generator().manual_seed(1)).to(z)
    for actual, wanted in zip([z, *torch.autograd.grad(z, (x, weight), dy)], expected, strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (((2, 5, 12), (3, 4, 8)), r"x: expected \[B,T,H,K\], got shape \(2, 5, 12\)"),
        (((2, 5, 3, 4), (4, 3, 8)), r"weight: expected \[3,4,N\], got shape \(4, 3, 8\)"),
    ],
)
def test_shapes_that_do_not_fit(sizes: tuple[tuple[int, ...], tuple[int, ...]], message: str):
    with pytest.raises(ValueError, match=message):
        kernels.head_linear(*(torch.zeros(size) for size in sizes))


def test_integers():
    with pytest.raises(ValueError, match=r"^x: expected a floating dtype, got torch.int64"):
        kernels.head_linear(torch.ones(2, 5, 3, 4, dtype=torch.int64), torch.ones(3, 4, 8))


def test_compiled():
    x, weight = leaves(2, 5, 3, 4, 12)
    run = torch.compile(lambda x, w: kernels.head_linear(x, w).sin(), fullgraph=True, backend="aot_eager")
    for actual, expected in zip(
        results(run, x, weight), results(lambda x, w: loop(x, w).sin(), x, weight), strict=True
    ):
        torch.testing.assert_close(actual, expected)
