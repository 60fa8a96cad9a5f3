"""Features of the columns of a projection, with gates: one node of autograd, and no concatenation of gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE

pytest.importorskip("triton")
from kernels.features.gpu import joint, token

pytestmark = pytest.mark.usefixtures("poison")

HEADS, SIZE = 2, 8  # of each stream
WIDTHS = [16, 16, 16, 16, 2, 2]  # of queries, keys, values, the output gate, decays and β
NAMES = ["q", "k", "v", "gate", "a", "b"]


def parameters(dtype: torch.dtype, before: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(0)
    sizes = {f"taps_{name}": (32 if before and name in "qk" else 16, 1, 4) for name in "qkv"}
    sizes |= {"A_log": (2,), "dt_bias": (2,)}
    if before:
        sizes |= {"product_q": (2, 8, 16), "product_k": (2, 8, 16)}
    return {name: torch.randn(size).to(DEVICE, dtype).requires_grad_() for name, size in sizes.items()}


def layer(
    y: Tensor,
    p: dict[str, Tensor],
    *,
    cu_seqlens: Tensor | None = None,
    with_gates: bool = True,
    unused: tuple[str, ...] = (),
) -> list[Tensor]:
    """Return the results of the ops that read the columns of a projection y, without those named in `unused`."""
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


UNUSED = [("k",), ("gate", "b"), ("a", "b"), ("q", "k", "v")]
CASES: list[dict[str, Any]] = [
    *(
        {"T": T, **options}
        for T in (1, 21)
        for options in ({}, {"with_gates": False}, *({"unused": names} for names in UNUSED))
    ),
    # activations in front of products
    *(
        {"T": 13, "before": True, "dtype": dtype, "recompute": recompute}
        for dtype in (torch.float32, torch.bfloat16)
        for recompute in (False, True)
    ),
    {"T": 19, "documents": [0, 3, 3, 10, 19]},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_written_where_the_columns_lie(case: dict[str, Any], copies: list[int]):
    options = dict(case)
    T, before, dtype = options.pop("T"), options.pop("before", False), options.pop("dtype", torch.float32)
    recompute, bounds = options.pop("recompute", False), options.pop("documents", None)
    if bounds is not None:
        options["cu_seqlens"] = torch.tensor(bounds, device=DEVICE)
    p = parameters(torch.float32, before)
    y = torch.randn(1 if bounds else 2, T, sum(WIDTHS), device=DEVICE)
    expected = differentiated("reference", y, p, **options)
    copies.clear()
    p = {name: x.detach().to(dtype).requires_grad_() for name, x in p.items()}
    actual = differentiated("triton", y.to(dtype), p, recompute, **options)
    assert not copies
    agree(actual, expected, 1e-5 if dtype == torch.float32 else 0.05)


def test_one_stream_and_another_column(copies: list[int]):
    """As in Mamba1: the convolved input, and the output gate."""
    taps, wide, actual = torch.randn(16, 1, 4, device=DEVICE), torch.randn(2, 9, 32, device=DEVICE), []
    for backend in ("triton", "reference"):
        y = wide.clone().requires_grad_()
        with kernels.backend(backend):
            x, gate = kernels.split_columns(y * 1, [16, 16])
            stream = kernels.FeatureStream(x.unsqueeze(-1), taps.requires_grad_(), activation="silu")
            ((x, _),), _, (gate,) = kernels.features_of_columns([stream], others=[gate])
        if backend == "triton":
            copies.clear()
        actual.append(torch.autograd.grad((x.squeeze(-1) * gate.sin()).sum(), [y, taps]))
        assert backend == "reference" or not copies
    torch.testing.assert_close(*actual, atol=1e-5, rtol=1e-5)


def test_an_empty_batch():
    p, y = parameters(torch.float32), torch.randn(0, 5, sum(WIDTHS), device=DEVICE)
    results, gradients = differentiated("triton", y, p)
    assert [*results[0].shape] == [0, 5, HEADS, SIZE]
    for name, x in {"y": y, **p}.items():
        gradient = gradients[name]
        assert gradient is not None, name
        assert gradient.shape == x.shape, name
        assert not gradient.any(), name


def test_columns_that_nothing_reads_are_concatenated(copies: list[int]):
    """Without the output gate, the gradients are not all columns."""
    p, y = parameters(torch.float32), torch.randn(2, 9, sum(WIDTHS), device=DEVICE)

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
    p, y = parameters(torch.float32), torch.randn(1, 5, sum(WIDTHS), device=DEVICE).requires_grad_()
    with kernels.backend("triton"):
        results = layer(y * 1, p)
    assert len({x.grad_fn for x in results if x is not results[3]}) == 1
    with torch.no_grad(), kernels.backend("triton"):
        monkeypatch.setattr(joint, "forward", None)
        layer(y, p)


@pytest.mark.parametrize(
    ("columns", "whole"), [([0, 1, 2], True), ([0, 2, 1], False), ([0, 1], False), ([1, 2], False)]
)
def test_split_columns(columns: list[int], whole: bool, copies: list[int]):
    """Gradients that are parts of one tensor, in order and without gaps, are not copied."""
    y, widths, gradient = torch.randn(3, 5, 9).requires_grad_(), [4, 2, 3], torch.randn(3, 5, 9)
    widths = [widths[i] for i in columns]
    of_columns = gradient.split([4, 2, 3], -1)
    arriving = [of_columns[i] for i in columns]
    y = y[..., : sum(widths)]
    with kernels.backend("triton"):
        parts = kernels.split_columns(y * 1, widths)
    expected = torch.cat(arriving, -1)
    copies.clear()
    (actual,) = torch.autograd.grad(parts, y, arriving)
    assert (not copies) is whole
    assert torch.equal(actual, expected)
    for part, wanted in zip(parts, y.split(widths, -1), strict=True):
        assert torch.equal(part, wanted)


@pytest.mark.gpu
def test_large_gradients_of_columns_are_copied():
    y = torch.randn(2**13, 528, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    widths = [256, 16, 256]
    arriving = [torch.randn(2**13, width, device="cuda", dtype=torch.bfloat16) for width in widths]
    (actual,) = torch.autograd.grad(kernels.split_columns(y * 1, widths), y, arriving)
    assert torch.equal(actual, torch.cat(arriving, -1))


def test_split_columns_under_a_compiler():
    y = torch.randn(2, 6).requires_grad_()

    def run(y: Tensor) -> Tensor:
        a, b = kernels.split_columns(y, [2, 4])
        return a.sum() + (b * b).sum()

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(y), y), torch.autograd.grad(run(y), y))


def test_split_columns_is_differentiated_twice():
    y = torch.randn(2, 6, dtype=torch.float64).requires_grad_()

    def run(y: Tensor) -> Tensor:
        with kernels.backend("triton"):
            a, b = kernels.split_columns(y, [2, 4])
        return torch.cat([b.sin(), a.exp()], -1)

    assert torch.autograd.gradgradcheck(run, y)


def alone(y: Tensor) -> list[Tensor]:
    return [y, y]


def rows(y: Tensor) -> list[Tensor]:
    return [*y.chunk(2, 0)]


def stacked(y: Tensor) -> list[Tensor]:
    return [*y.unflatten(0, (2, 1)).unbind(0)]


def times(y: Tensor) -> list[Tensor]:
    return [*y[:1].chunk(2, 1)]


def overlapping(y: Tensor) -> list[Tensor]:
    return [y[..., :16], y[..., 8:24]]


def expanded(y: Tensor) -> list[Tensor]:
    return [y[:, :1, :16].expand(-1, 6, -1), y[..., 16:32]]


@pytest.mark.parametrize("parts", [alone, rows, stacked, times, overlapping, expanded])
def test_inputs_that_share_memory_have_gradients_of_their_own(parts: Any):
    p, y = parameters(torch.float32), torch.randn(2, 6, 32, device=DEVICE)

    def gradients(backend: str) -> tuple[Tensor, ...]:
        x = y.detach().requires_grad_()
        with kernels.backend(backend):
            inputs = [part.unflatten(-1, (-1, SIZE)) for part in parts(x * 1)]
            taps = [p[name].repeat(2, 1, 1)[: inputs[0].shape[2] * SIZE] for name in ("taps_q", "taps_k")]
            streams = [kernels.FeatureStream(*both, activation="silu") for both in zip(inputs, taps, strict=True)]
            losses = [z.sin().sum() * i for i, (z, _) in enumerate(kernels.features_together(streams), 1)]
        return torch.autograd.grad(losses, (x, p["taps_q"], p["taps_k"]))

    torch.testing.assert_close(gradients("triton"), gradients("reference"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("several", [True, False])
def test_the_same_columns_for_several_uses(several: bool):
    """Several: as the inputs of both gates, and twice among the others. Otherwise once, as a tensor [B,T]."""
    p, y = parameters(torch.float32), torch.randn(2, 6, 35, device=DEVICE)

    def gradients(backend: str) -> tuple[Tensor, ...]:
        x = y.detach().requires_grad_()
        with kernels.backend(backend):
            q, k, gate, a = kernels.split_columns(x * 1, [16, 16, 1, 2])
            streams = [kernels.FeatureStream(z.unflatten(-1, (2, 8)), p["taps_q"]) for z in (q, k)]
            gates = kernels.GateInputs(a, p["A_log"], p["dt_bias"], a) if several else None
            others = [gate, gate, gate[..., 0]] if several else [gate[..., 0], a]
            made, both, others = kernels.features_of_columns(streams, gates, others)
        every = [*(z for z, _ in made), *(both or ()), *others]
        return torch.autograd.grad([z.sin().sum() * i for i, z in enumerate(every, 1)], (x, p["taps_q"]))

    torch.testing.assert_close(gradients("triton"), gradients("reference"), rtol=1e-5, atol=1e-5)


def test_the_backward_pass_is_in_the_mode_of_the_call(monkeypatch: pytest.MonkeyPatch):
    p, y = parameters(torch.float32), torch.randn(1, 5, sum(WIDTHS), device=DEVICE).requires_grad_()
    step, seen = joint.FEATURES, list[bool]()

    def differentiate(*args: Any) -> Any:
        seen.append(kernels.is_deterministic())
        return step.differentiate(*args)

    monkeypatch.setattr(joint, "FEATURES", step._replace(differentiate=differentiate))
    with kernels.backend("triton"), kernels.deterministic():
        results = layer(y * 1, p)
    torch.autograd.backward([x.sum() for x in results])
    assert seen == [True] * 3


def test_results_that_are_to_be_recomputed_are_not_saved():
    y = torch.randn(1, 5, 16, device=DEVICE).requires_grad_()
    with kernels.backend("triton"), kernels.recomputing():
        q = (y * 1).unflatten(-1, (HEADS, SIZE))
        streams = [kernels.FeatureStream(q, activation="silu", kept=kept) for kept in (False, True)]
        (a, _), (b, _) = kernels.features_together(streams)
        sines = [x.sin() for x in (a, b)]
    saved = [sine.grad_fn._saved_self.data_ptr() == x.data_ptr() for sine, x in zip(sines, (a, b), strict=True)]
    assert saved == [False, True]


def test_a_token_behind_an_activation_takes_one_launch(monkeypatch: pytest.MonkeyPatch):
    p, y = parameters(torch.float32, before=True), torch.randn(2, 1, 50, device=DEVICE)
    launch, launched = token.forward, list[int]()
    monkeypatch.setattr(
        token, "forward", lambda streams, gates: (launched.append(len(streams)), launch(streams, gates))[1]
    )

    def run(backend: str) -> Any:
        with torch.no_grad(), kernels.backend(backend):
            q, v, a = y.split([16, 32, 2], -1)
            streams = [
                kernels.FeatureStream(
                    x.unflatten(-1, (-1, SIZE)),
                    p["taps_q"],
                    return_history=True,
                    **({"product": p["product_q"], "subheads": 2, "before": "relu"} if x is q else {}),
                )
                for x in (q, v)
            ]
            return kernels.features_of_columns(streams, kernels.GateInputs(a, p["A_log"], p["dt_bias"], a))

    torch.testing.assert_close(run("triton"), run("reference"))
    assert launched == [2]
