"""Features of the columns of a projection, with gates: one node of autograd, and no concatenation of gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

pytest.importorskip("triton")
import kernels.core.allocation as allocation
from kernels.features.gpu import joint
from kernels.features.gpu import op as gpu_op

device = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, SIZE = 2, 8  # of each stream
WIDTHS = [16, 16, 16, 16, 2, 2]  # of queries, keys, values, the output gate, decays and β
NAMES = ["q", "k", "v", "gate", "a", "b"]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that reading unwritten memory shows."""
    allocate = allocation.new
    for module in (gpu_op, allocation):
        monkeypatch.setattr(
            module, "new", lambda *arguments, **options: allocate(*arguments, **options).fill_(torch.nan)
        )


def parameters(dtype: torch.dtype, before: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    sizes = {f"taps_{name}": (32 if before and name in "qk" else 16, 1, 4) for name in "qkv"}
    sizes |= {"A_log": (2,), "dt_bias": (2,)}
    if before:
        sizes |= {"product_q": (2, 8, 16), "product_k": (2, 8, 16)}
    return {name: torch.randn(size).to(device, dtype).requires_grad_() for name, size in sizes.items()}


def layer(
    y: Tensor,
    p: dict[str, Tensor],
    *,
    cu_seqlens: Tensor | None = None,
    with_gates: bool = True,
    unused: tuple[str, ...] = (),
) -> list[Tensor]:
    """What reads the columns of a projection y; results named in `unused` are left out."""
    parts = dict(zip(NAMES, kernels.split_columns(y, WIDTHS), strict=True))

    def stream(name: str) -> kernels.FeatureStream:
        x, norm, product = parts[name].unflatten(-1, (HEADS, SIZE)), "none" if name == "v" else "l2", None
        extra: dict[str, Any] = {}
        if (product := p.get(f"product_{name}")) is not None:
            extra = {"product": product, "subheads": 2, "before": "silu"}
        return kernels.FeatureStream(x, p[f"taps_{name}"], activation="silu", norm=norm, cu_seqlens=cu_seqlens, **extra)

    gates = kernels.GateInputs(parts["a"], p["A_log"], p["dt_bias"], parts["b"]) if with_gates else None
    others = [parts["gate"]] if with_gates else [parts[name] for name in ("gate", "a", "b")]
    made, both, others = kernels.features_of_columns([stream(name) for name in "qkv"], gates, others)
    results = dict(zip("qkv", (y for y, _ in made), strict=True)) | {"gate": others[0].sigmoid()}
    decay, beta = (others[1].exp(), others[2].exp()) if both is None else both
    results |= {"a": decay, "b": beta}
    return [x for name, x in results.items() if name not in unused]


def differentiated(
    backend: str, y: Tensor, p: dict[str, Tensor], recompute: bool = False, **options: Any
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """The results, and the gradients of y and of the parameters."""
    y = y.detach().requires_grad_()
    with kernels.backend(backend), kernels.recomputing(recompute):
        results = layer(y * 1, p, **options)
        made = [x.float().sin() for x in results]
    generator = torch.Generator().manual_seed(3)
    loss = sum((x * torch.randn(x.shape, generator=generator).to(x.device)).sum() for x in made)
    leaves = {"y": y, **p}
    gradients = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
    return results, dict(zip(leaves, gradients, strict=True))


def agree(actual: Any, expected: Any, tolerance: float) -> None:
    for x, wanted in zip(actual[0], expected[0], strict=True):
        torch.testing.assert_close(x.float(), wanted.float(), rtol=tolerance, atol=tolerance)
    for name, wanted in expected[1].items():
        x = actual[1][name]
        if wanted is None:
            assert x is None or not x.any(), name
        else:
            assert x is not None, name
            assert (x.float() - wanted.float()).norm() <= tolerance * wanted.float().norm() + 1e-12, name


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the concatenations."""
    counted: list[int] = []
    concatenate = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *args, **options: (counted.append(1), concatenate(*args, **options))[1])
    return counted


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"with_gates": False},
        {"unused": ("k",)},
        {"unused": ("gate", "b")},
        {"unused": ("a", "b")},
        {"unused": ("q", "k", "v")},
    ],
    ids=str,
)
@pytest.mark.parametrize("T", [1, 21])
def test_gradients_are_written_where_the_columns_lie(T: int, options: dict[str, Any], copies: list[int]):
    p = parameters(torch.float32)
    y = torch.randn(2, T, sum(WIDTHS), device=device)
    expected = differentiated("reference", y, p, **options)
    copies.clear()
    actual = differentiated("triton", y, p, **options)
    assert not copies or T == 1  # a single token has no stride between tokens
    agree(actual, expected, 1e-5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_in_front_of_products(dtype: torch.dtype, recompute: bool, copies: list[int]):
    p = parameters(torch.float32, before=True)
    y = torch.randn(2, 13, sum(WIDTHS), device=device)
    expected = differentiated("reference", y, p)
    copies.clear()
    p = {name: x.detach().to(dtype).requires_grad_() for name, x in p.items()}
    actual = differentiated("triton", y.to(dtype), p, recompute)
    assert not copies
    agree(actual, expected, 1e-5 if dtype == torch.float32 else 0.05)


def test_documents_packed_into_one_row(copies: list[int]):
    p, cu_seqlens = parameters(torch.float32), torch.tensor([0, 3, 3, 10, 19], device=device)
    y = torch.randn(1, 19, sum(WIDTHS), device=device)
    expected = differentiated("reference", y, p, cu_seqlens=cu_seqlens)
    copies.clear()
    actual = differentiated("triton", y, p, cu_seqlens=cu_seqlens)
    assert not copies
    agree(actual, expected, 1e-5)


def test_columns_that_nothing_reads_are_concatenated(copies: list[int]):
    """Without the output gate, the gradients are not all columns."""
    p, y = parameters(torch.float32), torch.randn(2, 9, sum(WIDTHS), device=device)

    def some(y: Tensor, backend: str) -> tuple[Tensor, ...]:
        y = y.detach().requires_grad_()
        with kernels.backend(backend):
            q, k, *rest = kernels.split_columns(y * 1, WIDTHS)
            streams = [kernels.FeatureStream(x.unflatten(-1, (2, 8)), p["taps_q"]) for x in (q, k)]
            (a, _), (b, _) = kernels.features_together(streams)
        return torch.autograd.grad((a * b).sum() + sum(x.square().sum() for x in rest[1:]), y)

    expected = some(y, "reference")
    copies.clear()
    torch.testing.assert_close(some(y, "triton"), expected)
    assert copies == [1]


def test_one_node(monkeypatch: pytest.MonkeyPatch):
    p, y = parameters(torch.float32), torch.randn(1, 5, sum(WIDTHS), device=device).requires_grad_()
    with kernels.backend("triton"):
        results = layer(y * 1, p)
    assert len({x.grad_fn for x in results if x is not results[3]}) == 1
    with torch.no_grad(), kernels.backend("triton"):
        monkeypatch.setattr(joint, "forward", None)
        layer(y, p)


@pytest.mark.parametrize(
    ("columns", "whole"),
    [([0, 1, 2], True), ([0, 2, 1], False), ([0, 1], False), ([1, 2], False)],
)
def test_split_columns(columns: list[int], whole: bool, copies: list[int]):
    """Gradients that are parts of one tensor, in order and without gaps, are not copied."""
    y, widths, gradient = torch.randn(3, 5, 9).requires_grad_(), [4, 2, 3], torch.randn(3, 5, 9)
    widths = [widths[i] for i in columns]
    given = [gradient.split([4, 2, 3], -1)[i] for i in columns]
    y = y[..., : sum(widths)]
    parts = kernels.split_columns(y * 1, widths)
    expected = torch.cat(given, -1)
    copies.clear()
    (actual,) = torch.autograd.grad(parts, y, given)
    assert (not copies) is whole
    assert torch.equal(actual, expected)
    for part, wanted in zip(parts, y.split(widths, -1), strict=True):
        assert torch.equal(part, wanted)


def test_split_columns_under_a_compiler():
    y = torch.randn(2, 6).requires_grad_()

    def run(y: Tensor) -> Tensor:
        a, b = kernels.split_columns(y, [2, 4])
        return a.sum() + (b * b).sum()

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(y), y), torch.autograd.grad(run(y), y))
