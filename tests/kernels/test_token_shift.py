"""Mixtures of each token with the previous one: by the formula, and in Triton."""

from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels import token_shift

from .op_contract import BACKENDS, DEVICE, OpContract, Tensors

BOUNDS = [0, 0, 3, 4, 9, 9]  # empty documents first, and last
ON_DEVICE = [0, 0, 1000, 1001, 4097]
FLOATING = r"x: expected a floating \[B,T,D\] with at least one token, got torch.float32"
SIZES = ((1, 1, 1, 1), (2, 7, 3, 2), (3, 9, 300, 6), (1, 5, 16, 3), (2, 3, 5, 4), (1, 4, 8, 5))


def shapes(*sizes: tuple[int, ...]) -> dict[str, Tensor]:
    return dict(zip(("x", "shares", "before"), map(torch.zeros, sizes), strict=False))


class TestTokenShift(OpContract):
    op = "token_shift"
    # B, T, D, number of mixtures, whether there are tokens before, and boundaries of documents
    sizes = (
        *((*sizes, continued, None) for sizes in SIZES for continued in (False, True)),
        *((1, 9, 5, 2, continued, BOUNDS) for continued in (False, True)),
    )
    some_sizes = (2, 5, 8, 3, False, None)
    formula_sizes = ((2, 4, 3, 2, True, None), (2, 4, 3, 2, False, None))
    low_sizes = ((2, 9, 33, 3, True, None),)
    device_sizes = ((3, 4097, 1024, 6, True, None), (1, 4097, 1024, 6, True, ON_DEVICE))
    low = ("x", "before", "y")
    low_tolerances = (1e-2, 5e-2)
    cu_seqlens: Tensor | None = None  # of the inputs
    misfits = (
        (shapes((2, 3), (1, 3)), f"{FLOATING} \\(2, 3\\)"),
        (shapes((1, 0, 3), (1, 3)), f"{FLOATING} \\(1, 0, 3\\)"),
        (shapes((1, 2, 3), (1, 4)), r"shares: expected \[n,3\], got shape \(1, 4\)"),
        (shapes((1, 2, 3), (1, 3), (2, 3)), r"before: expected \[1, 3\], got shape \(2, 3\)"),
        (
            shapes((1, 2, 3), (1, 3)) | {"cu_seqlens": torch.tensor([0, 3])},
            "cu_seqlens: ends at 3, but there are 2 tokens",
        ),
        (
            shapes((2, 2, 3), (1, 3)) | {"cu_seqlens": torch.tensor([0, 2])},
            "cu_seqlens: packed documents need a batch of 1 row, got 2",
        ),
    )
    fitting = (1, 2, 3, 1, False, None)
    refused = (((1, 3, 4, 7, False, None), "which makes at most 6 mixtures"),)

    def inputs(self, B: int, T: int, D: int, n: int, continued: bool, bounds: list[int] | None) -> Tensors:
        """x, shares beyond 0 and 1, and the tokens before the sequences."""
        self.cu_seqlens = None if bounds is None else torch.tensor(bounds, device=DEVICE)
        tensors = {"x": (B, T, D), "shares": (n, D)}
        tensors |= {"before": (B if bounds is None else len(bounds) - 1, D)} if continued else {}
        return {name: 2 * torch.randn(shape).to(DEVICE) for name, shape in tensors.items()}

    def rounded(self, tensors: Tensors, dtype: torch.dtype = torch.bfloat16) -> Tensors:
        """In long sequences, as in training, tokens before them stay in fp32."""
        low = super().rounded(tensors, dtype)
        return low | {"before": tensors["before"]} if tensors["x"].shape[1] > 1000 else low

    def call(self, **tensors: Any) -> Tensor:
        return torch.stack(token_shift(**{"cu_seqlens": self.cu_seqlens, **tensors}))

    def formula(self, x, shares, before=None) -> Tensor:
        first = torch.zeros_like(x[:, :1]) if before is None else before[:, None]
        previous = torch.cat([first, x[:, :-1]], 1)
        return torch.stack([x + (previous - x) * share for share in shares])

    test_the_op_is_registered_properly = None  # the number of results depends on the shares

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_empty_documents_have_no_gradient(self, backend: str):
        gradient = self.results(self.inputs(1, 9, 5, 2, True, BOUNDS), backend)["dbefore"]
        assert not gradient[[0, 4]].any()
        assert gradient.any(1).sum() == 3

    @pytest.mark.parametrize("backend", ["reference", *BACKENDS])
    def test_a_batch_without_rows(self, backend: str):
        actual = self.results(self.inputs(0, 5, 3, 2, False, None), backend)
        assert (actual["y"].shape, actual["dx"].shape) == ((2, 0, 5, 3), (0, 5, 3))
        assert torch.equal(actual["dshares"], torch.zeros_like(actual["dshares"]))

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_under_autocast_the_mixtures_have_the_dtype_of_the_next_layer(self, backend: str):
        with torch.autocast(DEVICE, torch.bfloat16):
            actual = self.results(self.inputs(1, 3, 8, 2, False, None), backend)
        dtypes = {"y": torch.bfloat16, "dx": torch.float32, "dshares": torch.float32}
        assert {name: x.dtype for name, x in actual.items()} == dtypes


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_mixture_without_a_gradient(backend: str):
    x, shares = (t.requires_grad_() for t in TestTokenShift().inputs(2, 5, 8, 2, False, None).values())
    gradients = []
    for one in (backend, "reference"):
        with kernels.backend(one):
            y, _ = token_shift(x, shares)
        gradients.append(torch.autograd.grad(y.sin().sum(), (x, shares)))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixtures_are_recomputed_to_the_bit(backend: str):
    x, shares = (t.requires_grad_() for t in TestTokenShift().inputs(2, 5, 8, 3, False, None).values())
    gradients, bytes_saved = [], []
    for recompute in (False, True):
        saved: dict[int, int] = {}

        def note(t: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[t.data_ptr()] = t.numel()
            return t

        hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
        with hooks, kernels.backend(backend), kernels.recomputing(recompute):
            z = sum(y.sin().sum() for y in token_shift(x * 1, shares))
        gradients.append(torch.autograd.grad(z, (x, shares)))
        bytes_saved.append(sum(saved.values()))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert bytes_saved[1] < bytes_saved[0]
