"""Features that include the product of an expansion: step by step without a GPU, and as they are on one."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE
from .comparisons import interpreted as without_a_gpu
from .gluon_interpreter import interpreted
from .hopper import MOST, shared_memory

pytest.importorskip("triton")
from kernels.features.gpu import expanded

GLUON = "kernels.features.gpu.expanded_kernels"
TOLERANCE = 3e-3 if DEVICE == "cuda" else 5e-3  # Triton's interpreter cuts bits off where a device rounds
SHAPES = [
    {"B": 1, "T": 64, "heads": 1, "subheads": 1},
    {"B": 2, "T": 65, "heads": 2, "subheads": 1, "norm": "l2"},
    {"B": 1, "T": 200, "heads": 1, "subheads": 2, "activation": "identity"},
    {"B": 1, "T": 180, "heads": 1, "subheads": 1, "activation": "identity", "norm": "l2"},
]


def stream(B: int, T: int, heads: int, subheads: int, **how: Any) -> dict[str, Any]:
    """The arguments of a stream that is expanded."""
    C = heads * subheads * 128
    tensors = {
        "x": torch.randn(B, T, heads, 128),
        "product": torch.randn(heads, 128, subheads * 128) * 128**-0.5,
        "weight": torch.rand(C, 1, 4) - 0.5,
    }
    arguments = {name: x.bfloat16().to(DEVICE) for name, x in tensors.items()}
    return {**arguments, "subheads": subheads, "activation": "silu", "norm": "none", **how}


def results(arguments: dict[str, Any], backend: str) -> dict[str, Tensor]:
    """The features, and the gradients of all tensors."""
    leaves = {name: x.detach().requires_grad_() for name, x in arguments.items() if isinstance(x, Tensor)}
    with kernels.backend(backend):
        ((y, _),) = kernels.features_together([kernels.FeatureStream(**{**arguments, **leaves})])
    arriving = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(y)
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), arriving), strict=True))}


def compare(arguments: dict[str, Any]) -> None:
    """Against PyTorch in fp32, relative to the norm of each result; and that a repeat has the same bits."""
    exact = {name: x.float() if isinstance(x, Tensor) else x for name, x in arguments.items()}
    expected, actual = results(exact, "torch"), results(arguments, "triton")
    for name, x in expected.items():
        y = actual[name]
        assert (y.shape, y.dtype) == (x.shape, torch.bfloat16), name
        assert float((y.float() - x).norm()) <= TOLERANCE * float(x.norm()), name
    for _ in range(10 if DEVICE == "cuda" else 1):
        again = results(arguments, "triton")
        assert all(torch.equal(x, again[name]) for name, x in actual.items())


@pytest.fixture
def gluon(monkeypatch: pytest.MonkeyPatch, poison: None) -> Iterator[None]:
    """The kernels for Hopper, step by step on the CPU."""
    monkeypatch.setitem(sys.modules, GLUON, module := interpreted(GLUON, "forward", "backward"))
    monkeypatch.setattr(sys.modules["kernels.features.gpu"], "expanded_kernels", module, raising=False)
    monkeypatch.setattr(expanded, "runs_gluon", lambda device: True)
    expanded.launch.cache_clear()
    yield
    expanded.launch.cache_clear()


@pytest.mark.slow
@without_a_gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_step_by_step(shape: dict[str, Any], gluon: None):
    compare(stream(**shape))


@without_a_gpu
def test_several_runs_of_a_sequence(gluon: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expanded, "cut", lambda tiles, columns, room: (tiles, 1))
    compare(stream(2, 150, 1, 1))


@without_a_gpu
@pytest.mark.parametrize(("offset", "gap"), [(1, 8), (0, 8)])
def test_inputs_that_are_not_aligned(offset: int, gap: int, gluon: None):
    """They are copied, since the kernel does not compile for such addresses and strides."""
    arguments = stream(2, 65, 1, 1)
    memory = torch.zeros(2, 65, 1, 128 + gap).bfloat16()
    arguments["x"] = x = memory[..., offset : offset + 128].copy_(arguments["x"])
    args = expanded.Arguments(x, arguments["product"], arguments["weight"], "silu", "none")
    _, copied, _ = expanded.prepared(False, args)
    assert torch.equal(copied, x)
    assert copied.data_ptr() % 16 == copied.stride(0) % 16 == copied.stride(1) % 8 == 0
    compare(arguments)


@pytest.mark.slow
@without_a_gpu
@pytest.mark.parametrize(("again", "kept", "launches"), [(False, False, 2), (True, False, 3), (True, True, 2)])
def test_computed_again_or_kept(again: bool, kept: bool, launches: int, gluon: None, monkeypatch: pytest.MonkeyPatch):
    arguments, readout = stream(1, 70, 1, 1), torch.randn(128, 3).bfloat16()
    calls, prepared = [], expanded.prepared
    monkeypatch.setattr(expanded, "prepared", lambda *how: calls.append(how) or prepared(*how))
    actual = []
    for recomputing in (again, False):
        leaves = {name: x.clone().requires_grad_() for name, x in arguments.items() if isinstance(x, Tensor)}
        weight = readout.clone().requires_grad_()  # its gradient needs the features
        with kernels.backend("triton"), kernels.recomputing(recomputing):
            ((y, _),) = kernels.features_together([kernels.FeatureStream(**{**arguments, **leaves}, kept=kept)])
            loss = (y @ weight).float().square().sum()
        actual.append(torch.autograd.grad(loss, [*leaves.values(), weight]))
    assert len(calls) == launches + 2
    assert all(torch.equal(x, z) for x, z in zip(*actual, strict=True))


@pytest.mark.parametrize(
    "other",
    [
        {"bias": torch.zeros(128)},
        {"history": torch.zeros(1, 3, 128)},
        {"return_history": True},
        {"cu_seqlens": torch.tensor([0, 20, 70])},
        {"weight": torch.zeros(128, 1, 3)},
        {"activation": "relu"},
        {"norm": "l1"},
        {"subheads": 2},
        {"x": torch.zeros(1, 70, 1, 128)},
        {"x": torch.zeros(1, 9, 1, 128, dtype=torch.bfloat16)},
    ],
)
def test_what_takes_a_product_of_its_own(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expanded, "runs_gluon", lambda device: True)
    arguments = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in stream(1, 70, 1, 1).items()}
    assert expanded.fits(kernels.FeatureStream(**arguments))
    assert not expanded.fits(kernels.FeatureStream(**{**arguments, **other}))
    assert not expanded.fits(kernels.FeatureStream(arguments["x"], arguments["weight"]))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_product_and_features_of_its_result(backend: str):
    x, product, weight = torch.randn(2, 9, 3, 4), torch.randn(3, 4, 10), torch.randn(30, 1, 4)
    with kernels.backend(backend):
        whole = kernels.FeatureStream(x, weight, activation="silu", norm="l2", product=product, subheads=2)
        ((y, _),) = kernels.features_together([whole])
        expanded = torch.einsum("bthk,hkn->bthn", x, product).reshape(2, 9, 6, 5)
        z, _ = kernels.features(expanded, weight, activation="silu", norm="l2")
    torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "product", [torch.zeros(3, 5, 8), torch.zeros(2, 4, 8), torch.zeros(3, 4, 9), torch.zeros(12, 8)]
)
def test_a_product_that_does_not_fit(product: Tensor):
    with pytest.raises(ValueError, match=r"^product: expected \[3,4,N\] with a multiple N of 2 subheads"):
        kernels.FeatureStream(torch.zeros(1, 9, 3, 4), product=product, subheads=2)


def test_an_activation_in_front_of_a_product_that_does_not_fit():
    x, product = torch.zeros(1, 9, 3, 4), torch.zeros(3, 4, 8)
    with pytest.raises(ValueError, match=r"^before: 'silu' needs a product"):
        kernels.FeatureStream(x, before="silu")
    with pytest.raises(ValueError, match=r"^before: 'gelu' is not one of identity, silu"):
        kernels.FeatureStream(x, product=product, before="gelu")


@pytest.mark.parametrize(("tiles", "columns"), [(67, 512), (71, 512), (2, 8), (1, 1), (1000, 64)])
def test_runs_hold_all_tiles(tiles: int, columns: int):
    runs, each = expanded.cut(tiles, columns, 396)
    assert (runs - 1) * each < tiles <= runs * each


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "norm"),
    [("forward", {"L2": False, "EPS": 1e-6}), ("forward", {"L2": True, "EPS": 1e-6}), ("backward", {})],
)
def test_compiles_for_hopper(kernel: str, norm: dict[str, Any]):
    how = expanded.FORWARD if kernel == "forward" else expanded.BACKWARD
    fixed = {"x_token": 1024, "C": 8192, "SUBHEADS": 8, "SILU": True, "TILE": how.tokens, **norm}
    other = {"T": "i32", "tiles": "i32", "x_batch": "i32", "dtaps": "*fp32"}
    assert shared_memory(GLUON, kernel, fixed, other) <= MOST // how.programs


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES,
        *({"B": 3, "T": T, "heads": 2, "subheads": 4, "norm": norm} for T in (1500, 4096) for norm in ("none", "l2")),
    ],
)
def test_device(shape: dict[str, Any], poison: None):
    compare(stream(**shape))
