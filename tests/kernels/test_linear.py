"""A linear map of few rows: its Triton kernel beside the plain product, and where it runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

from .places import PLACES

pytest.importorskip("triton")
from kernels.gpu.device import GPUS, assumed
from kernels.gpu.paths import dry_run

SHAPES = [(1, 1, 1), (1, 70, 33), (2, 64, 100), (2, 1025, 5), (1, 2300, 129)]  # rows, inputs, outputs


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that reading unwritten memory shows."""
    from kernels.linear.gpu import op as module

    allocate = module.new
    monkeypatch.setattr(module, "new", lambda *arguments, **options: allocate(*arguments, **options).fill_(torch.nan))


def inputs(rows: int, I: int, O: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, 1, I), (O, I), (O,)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.slow
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_triton_and_the_loop(shape: tuple[int, int, int], bias: bool, dtype: torch.dtype, device: str):
    x, weight, added = inputs(*shape, dtype, device)
    expected = F.linear(x.double(), weight.double(), added.double() if bias else None)
    for backend in ("triton", "reference"):
        with kernels.backend(backend), kernels.implementations() as ran:
            y = kernels.linear(x, weight, added if bias else None)
        assert ran == {"linear": {backend}}
        assert (y.shape, y.dtype) == (expected.shape, dtype)
        assert error(y, expected) <= (1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("rows", [1, 2])
@torch.no_grad()
def test_the_gated_product_in_the_same_launch(rows: int, activation: str, device: str):
    gate_up, weight, _ = inputs(rows, 2 * 150, 37, torch.bfloat16, device)
    weight = weight[:, :150].contiguous()
    actual = {}
    for backend in ("triton", "reference"):
        with kernels.backend(backend):
            actual[backend] = kernels.gated_linear(gate_up, weight, activation=activation)
    assert error(actual["triton"], actual["reference"]) <= 1e-2


@pytest.mark.parametrize("device", PLACES)
def test_rows_that_are_cut_out(device: str):
    x, weight, _ = inputs(2, 60, 7, device=device)
    wide = torch.cat([x, x], -1)[..., 30:90]
    with torch.no_grad(), kernels.backend("triton"):
        actual = kernels.linear(wide, weight[:, :60])
    assert error(actual, F.linear(wide, weight)) <= 1e-6


def test_the_op_is_registered_properly():
    x, weight, bias = inputs(2, 20, 7)
    torch.library.opcheck(
        torch.ops.token_mixer_zoo.linear_few, (x, weight, bias, "none", False), test_utils="test_schema"
    )
    with torch.no_grad(), kernels.backend("triton"):
        compiled = torch.compile(kernels.linear, backend="aot_eager", fullgraph=True)(x, weight, bias)
        assert torch.equal(compiled, kernels.linear(x, weight, bias))


TILES = [(3, 64, 16), (17, 70, 33), (64, 300, 40), (5, 128, 2049)]  # narrow and wide


@pytest.mark.slow
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", TILES)
@torch.no_grad()
def test_tiles_of_few_rows(shape: tuple[int, int, int], dtype: torch.dtype, device: str):
    x, weight, bias = inputs(*shape, dtype, device)
    with dry_run() as record, kernels.backend("triton"):
        kernels.linear(x, weight)
    assert [launch.name for launch in record.launches] == ["linear.op.linear_tile"]
    for added in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
        with kernels.backend("triton"), kernels.implementations() as ran:
            y = kernels.linear(x, weight, added)
            alone = kernels.linear(x[-3:], weight, added)
        assert ran == {"linear": {"triton"}}
        assert (y.shape, y.dtype) == (expected.shape, dtype)
        assert error(y, expected) <= 4e-3
        assert torch.equal(alone, y[-3:])  # of three rows or more, a row does not depend on the others


@pytest.mark.parametrize(("rows", "outputs", "tiles"), [(64, 8192, True), (65, 16, False), (3, 8193, False)])
@torch.no_grad()
def test_products_that_cublas_computes(rows: int, outputs: int, tiles: bool):
    x, weight = torch.zeros(rows, 1, 8, dtype=torch.bfloat16), torch.zeros(outputs, 8, dtype=torch.bfloat16)
    with dry_run() as record, kernels.backend("triton"):
        kernels.linear(x, weight)
    assert bool(record.launches) is tiles


@pytest.mark.parametrize("gpu", ["A100", "H100"])
@torch.no_grad()
def test_tiles_are_for_hopper(gpu: str):
    x, weight, _ = inputs(4, 32, 8, torch.bfloat16)
    with assumed(GPUS[gpu]), dry_run() as record, kernels.backend("triton"):
        kernels.linear(x, weight)
    assert len(record.launches) == (gpu == "H100")


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("activation", ["silu", "identity"])
@torch.no_grad()
def test_the_gated_product_of_more_rows(activation: str, device: str):
    gate_up, weight, _ = inputs(7, 2 * 150, 37, torch.bfloat16, device)
    weight = weight[:, :150].contiguous()
    with kernels.backend("triton"), dry_run() as record:
        kernels.gated_linear(gate_up, weight, activation=activation)
    assert [spec.name for spec in record.launches] == ["gated_linear.op.multiply", "linear.op.linear_tile"]
    with kernels.backend("triton"):
        actual = kernels.gated_linear(gate_up, weight, activation=activation)
    with kernels.backend("reference"):
        assert error(actual, kernels.gated_linear(gate_up, weight, activation=activation)) <= 1e-2


@pytest.mark.parametrize(
    ("rows", "kind", "gradients"),
    [(3, torch.float32, False), (3, torch.bfloat16, False), (1, torch.bfloat16, False), (1, torch.float32, True)],
)
def test_everything_else_is_pytorchs(rows: int, kind: torch.dtype, gradients: bool):
    """Many rows, gradients, and under autocast."""
    x, weight, bias = inputs(rows, 20, 7)
    weight.requires_grad_(gradients)
    mixed = torch.autocast("cpu", torch.bfloat16, enabled=kind == torch.bfloat16)
    with torch.set_grad_enabled(gradients), mixed, kernels.backend("triton"), kernels.implementations() as ran:
        y = kernels.linear(x, weight, bias)
    assert ran == {}
    assert (y.dtype, y.requires_grad) == (kind, gradients)


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ([(1, 3), (4, 5), (4,)], r"weight: expected \[O,3\], got shape \(4, 5\)"),
        ([(1, 3), (4, 3), (3,)], r"bias: expected \[4\], got shape \(3,\)"),
    ],
)
def test_misfits(shapes: list[tuple[int, ...]], said: str):
    with pytest.raises(ValueError, match=f"^{said}"):
        kernels.linear(*map(torch.zeros, shapes))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 16, 64])
@pytest.mark.parametrize(("I", "O"), [(1024, 4112), (1024, 1024), (2816, 1024), (1000, 5632), (16384, 512), (999, 77)])
@torch.no_grad()
def test_on_device(rows: int, I: int, O: int):
    x, weight, bias = inputs(rows, I, O, torch.bfloat16, "cuda")
    expected = F.linear(x.double(), weight.double(), bias.double())
    with kernels.backend("triton"):
        actual = kernels.linear(x, weight, bias)
        assert error(actual, expected) <= 4e-3
        assert all(torch.equal(kernels.linear(x, weight, bias), actual) for _ in range(5))
        gated = kernels.gated_linear(torch.cat([x, x], -1), weight)
    with kernels.backend("reference"):
        assert error(gated, kernels.gated_linear(torch.cat([x, x], -1).float(), weight.float())) <= 6e-3
