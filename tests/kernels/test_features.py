"""Short convolution, activation and norm: PyTorch against a loop."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.core.recompute import noted

PACKED = [0, 0, 1, 3, 10, 10, 20, 20]  # documents shorter than the convolution, and empty ones
STAGES = list(product(kernels.ACTIVATIONS, kernels.NORMS))
Arguments = dict[str, Tensor]


def inputs(
    T: int,
    *,
    B: int = 2,
    heads: int = 3,
    size: int = 5,
    W: int = 4,
    bias: bool = True,
    history: bool = True,
    documents: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Arguments:
    """Arguments of `features`; W = 0 is no convolution."""
    C, B = heads * size, 1 if documents else B
    a = {"x": torch.randn(B, T, heads, size)}
    if W:
        a["weight"] = torch.randn(C, 1, W)
    if W and bias:
        a["bias"] = torch.randn(C)
    if W and history:
        a["history"] = torch.randn(len(documents) - 1 if documents else B, W - 1, C)
    a = {name: x.to(dtype) for name, x in a.items()}
    if documents:
        a["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
    return a


def results(a: Arguments, backend: str, **options: Any) -> Arguments:
    """y, the next history, and the gradient of each floating argument."""
    leaves = {name: x.detach().requires_grad_() for name, x in a.items() if x.is_floating_point()}
    with kernels.backend(backend):
        y, history = kernels.features(**{**a, **leaves}, return_history=True, **options)
    actual = {"y": y, "history": history}
    generator = torch.Generator(y.device).manual_seed(1)
    arriving = [torch.randn(x.shape, generator=generator, device=x.device).bfloat16() for x in actual.values()]
    loss = sum((x * g.to(x)).sum() for x, g in zip(actual.values(), arriving, strict=True))
    gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    actual.update({f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)})
    return {name: x.detach() for name, x in actual.items()}


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], output: float, gradient: float) -> None:
    """Each result, relative to its norm."""
    for name, x in expected.items():
        assert actual[name].shape == x.shape, name
        assert actual[name].isfinite().all(), f"{name} is not finite"
        error, norm = float((actual[name].double() - x.double()).norm()), float(x.double().norm())
        allowed = gradient if name.startswith("gradient") else output
        assert error <= allowed * norm, f"{name}: error {error:.2g} at norm {norm:.2g}, allowed {allowed:g} of it"


def agree(a: Arguments, backend: str, output: float = 1e-5, gradient: float = 1e-5, **options: Any) -> Arguments:
    """The results of a backend, after they have been compared with the loop in fp64."""
    actual = results(a, backend, **options)
    exact = {name: x.double() if x.is_floating_point() else x for name, x in a.items()}
    assert actual["y"].dtype == a["x"].dtype
    assert_same(actual, results(exact, "reference", **options), output, gradient)
    return actual


@pytest.mark.parametrize("documents", [None, PACKED])
@pytest.mark.parametrize(("activation", "norm"), STAGES)
def test_torch_is_the_loop(activation: str, norm: str, documents: list[int] | None):
    agree(inputs(20, documents=documents), "torch", 1e-9, 1e-9, activation=activation, norm=norm)


@pytest.mark.parametrize("W", [0, 1, 2])
@pytest.mark.parametrize("documents", [None, PACKED])
@pytest.mark.parametrize("history", [True, False])
def test_torch_with_few_taps(W: int, documents: list[int] | None, history: bool):
    agree(inputs(20, W=W, history=history, documents=documents), "torch", 1e-9, 1e-9, activation="silu", norm="l2")


def test_by_hand():
    x, weight = torch.tensor([1.0, 2.0, -3.0]).view(1, 3, 1, 1), torch.tensor([10.0, 1.0]).view(1, 1, 2)
    for backend in ("torch", "reference"):
        with kernels.backend(backend):
            y, history = kernels.features(x, weight, torch.ones(1), activation="relu", return_history=True)
            assert y.flatten().tolist() == [2, 13, 18]
            assert history.flatten().tolist() == [-3]
            assert kernels.features(x, norm="l2")[0].flatten().tolist() == pytest.approx([1, 1, -1], abs=1e-6)


def test_the_norm_is_over_each_head():
    a = inputs(6, W=0)
    for norm, p in (("l2", 2), ("l1", 1)):
        lengths = kernels.features(**a, norm=norm)[0].norm(p, -1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths), atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_without_anything_to_do(backend: str):
    a = inputs(6, W=0)
    with kernels.backend(backend):
        y, history = kernels.features(**a)
    assert torch.equal(y, a["x"])
    assert history is None


@pytest.mark.parametrize("W", [0, 3])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_batch_without_rows(backend: str, W: int):
    a = inputs(6, B=0, W=W)
    actual = results(a, backend, norm="l2")
    assert actual["y"].shape == (0, 6, 3, 5)
    assert actual["history"].shape == (0, max(W - 1, 0), 15)
    assert not any(actual[f"gradient of {name}"].any() for name in a)


@pytest.mark.parametrize("kept", [True, False, None])
@pytest.mark.parametrize("after", [{}, {"weight": torch.ones(6, 1, 2)}, {"activation": "silu"}, {"norm": "l2"}])
def test_a_product_is_saved_only_if_it_is_the_result(after: dict[str, Any], kept: bool | None):
    matrix = torch.ones(1, 3, 6, requires_grad=True)
    with kernels.recomputing():
        x = kernels.FeatureStream(torch.ones(1, 4, 1, 3), product=matrix, kept=kept, **after).multiplied().x
        assert noted(x) == (kept is not True or after != {})


def test_silent_heads_have_gradients():
    for activation, norm in STAGES:
        x = torch.zeros(1, 2, 1, 4, requires_grad=True)
        y, _ = kernels.features(x, activation=activation, norm=norm)
        y.sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x: x[0]),
        ("x", lambda x: x.long()),
        ("weight", lambda x: x[:4]),
        ("weight", lambda x: x[:, 0]),
        ("weight", lambda x: x.expand(-1, 2, -1)),
        ("bias", lambda x: x[:4]),
        ("weight", lambda x: None),  # the bias has no place then
        ("history", lambda x: x[:, :2]),
        ("history", lambda x: x[:1]),
        ("activation", lambda x: "gelu"),
        ("norm", lambda x: "l3"),
        ("cu_seqlens", lambda x: torch.tensor([0, 6])),  # two rows
    ],
)
def test_errors_name_the_argument(name: str, change: Any):
    a: dict[str, Any] = inputs(6)
    kernels.features(**a)  # right as they are
    a[name] = change(a.get(name))
    with pytest.raises(ValueError, match=r"^bias: " if a["weight"] is None else rf"^{name}: "):
        kernels.features(**a)
