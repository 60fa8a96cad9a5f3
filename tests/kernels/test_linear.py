"""A linear map of few rows: its Triton kernel beside the plain product, and where it runs."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.linear import Product, few_products

from .places import PLACES

pytest.importorskip("triton")
from kernels.gpu.device import GPUS, assumed
from kernels.gpu.paths import dry_run

pytestmark = pytest.mark.usefixtures("poison")

# rows, inputs, outputs
SHAPES = [(1, 1, 1), (1, 70, 33), (2, 64, 100), (2, 1025, 5), (1, 2300, 300), (1, 40, 2100), (1, 1050, 1025)]


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
    for backend, constant in (("triton", []), ("triton", [weight]), ("reference", [])):
        with kernels.backend(backend), kernels.read_only(constant), kernels.implementations() as ran:
            y = kernels.linear(x, weight, added if bias else None)
        assert ran == {"linear": {backend}}
        assert (y.shape, y.dtype) == (expected.shape, dtype)
        assert error(y, expected) <= (1e-2 if dtype == torch.bfloat16 else 1e-6)


MLPS = [(1, 70, 37), (1, 40, 1100), (2, 1030, 150), (3, 70, 37), (64, 130, 1100)]  # rows, inputs, inner size


def mlp_inputs(rows: int, I: int, inner: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float16  # the interpreter cuts digits of bf16 off
    x, weight, _ = inputs(rows, I, 2 * inner, dtype, device)
    down = torch.randn(33, inner, generator=torch.Generator().manual_seed(1)) / inner**0.5
    return x, weight / I**0.5, down.to(device, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("shape", MLPS)
@torch.no_grad()
def test_a_gated_mlp_of_few_rows(shape: tuple[int, int, int], activation: str, device: str):
    x, gate_up, down = mlp_inputs(*shape, device)
    with dry_run() as record, kernels.backend("triton"):
        kernels.gated_mlp(x, gate_up, down, activation=activation)
    kernel = "linear.op.linear_rows" if len(x) <= 2 else "linear.op.linear_tile"
    assert [launch.name for launch in record.launches] == [kernel] * 2
    gate, up = F.linear(x.double(), gate_up.double()).chunk(2, -1)
    expected = F.linear((F.silu(gate) if activation == "silu" else gate) * up, down.double())
    for backend, constant in (("triton", []), ("triton", [gate_up, down]), ("torch", []), ("reference", [])):
        with kernels.backend(backend), kernels.read_only(constant), kernels.implementations() as ran:
            y = kernels.gated_mlp(x, gate_up, down, activation=activation)
        assert ran == {"gated_product": {backend}, "linear": {backend}}
        assert (y.shape, y.dtype) == (expected.shape, x.dtype)
        assert error(y, expected) <= (6e-3 if device == "cuda" else 2e-3)
        if backend == "triton" and len(x) > 2:
            with kernels.backend(backend):
                alone = kernels.gated_mlp(x[-3:], gate_up, down, activation=activation)
            assert torch.equal(alone, y[-3:])


def test_a_gated_mlp_of_many_rows_or_with_gradients():
    x, gate_up, down = (part.float().requires_grad_() for part in mlp_inputs(5, 20, 12, "cpu"))
    with kernels.implementations() as ran:
        y = kernels.gated_mlp(x, gate_up, down)
    assert set(ran) == {"gated_mlp", "gated_linear"}
    assert torch.equal(y, kernels.gated_linear(F.linear(x, gate_up), down))


@pytest.mark.parametrize("device", PLACES)
@torch.no_grad()
def test_empty_batches(device: str):
    x, gate_up, down = mlp_inputs(0, 20, 12, device)
    with kernels.backend("triton"):
        assert kernels.linear(x, gate_up).shape == (0, 1, 24)
        assert kernels.gated_mlp(x, gate_up, down).shape == (0, 1, 33)


@pytest.mark.parametrize(("gpu", "launches"), [("A100", 0), ("H100", 2)])
@torch.no_grad()
def test_tiles_of_a_gated_mlp_are_for_hopper(gpu: str, launches: int):
    x, gate_up, down = mlp_inputs(3, 20, 12, "cpu")
    with assumed(GPUS[gpu]), dry_run() as record, kernels.backend("triton"):
        y = kernels.gated_mlp(x, gate_up, down)
    assert len(record.launches) == launches
    if not launches:
        assert error(y, kernels.gated_mlp(x.double(), gate_up.double(), down.double())) <= 1e-2


@pytest.mark.parametrize(
    ("rows", "I", "O", "dtype", "early"),
    [
        (1, 1024, 4096, torch.bfloat16, 1),
        (1, 2816, 1024, torch.bfloat16, 3),
        (1, 6000, 1024, torch.bfloat16, 6),
        (2, 2816, 1024, torch.bfloat16, 3),
        (1, 2048, 1024, torch.float32, 1),  # of two tiles
        (1, 70, 33, torch.float32, 1),
    ],
)
@torch.no_grad()
def test_read_only_weights_are_loaded_early(rows: int, I: int, O: int, dtype: torch.dtype, early: int):
    """Weights that are copies or were not named, and those of calls after the block, are loaded with x."""
    x, weight, _ = inputs(rows, I, 2 * O, dtype)
    with dry_run() as record, kernels.backend("triton"):
        with kernels.read_only([weight]):
            for each in (weight[:O], weight[O:], weight[:O].clone()):
                kernels.linear(x, each)
            with kernels.read_only([x]):
                kernels.linear(x, weight[:O])
        kernels.linear(x, weight[:O])
    assert [launch.constants["EARLY"] for launch in record.launches] == [early, early, 0, early, 0]


@pytest.mark.gpu
@torch.no_grad()
def test_read_only_weights_that_change_between_replays():
    """A replay sees what was written just before it, and products in front of the one that reads early."""
    x, first, _ = inputs(1, 1024, 2816, torch.bfloat16, "cuda")
    second = inputs(1, 2816, 1024, torch.bfloat16, "cuda")[1]
    first, second = first / 32, second / 32

    def step() -> Tensor:
        y = x
        for _ in range(8):
            y = kernels.linear(kernels.linear(y, first), second)
        return y

    with kernels.backend("triton"):
        step()
        graph = torch.cuda.CUDAGraph()
        with kernels.read_only([first, second]), torch.cuda.graph(graph):
            y = step()
        for i in range(50):
            first.mul_(1 - 2 * (i % 2)).add_(1e-3)
            second.neg_()
            graph.replay()
            assert torch.equal(y, step())


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


# rows, inputs, outputs, and the expected width of tiles on 132 multiprocessors
TILES = [(3, 64, 16, 16), (17, 70, 33, 16), (64, 300, 40, 16), (5, 128, 2113, 32), (3, 20, 4225, 64), (3, 8, 8192, 64)]


@pytest.mark.slow
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "I", "O", "width"), TILES)
@torch.no_grad()
def test_tiles_of_few_rows(rows: int, I: int, O: int, width: int, dtype: torch.dtype, device: str):
    x, weight, bias = inputs(rows, I, O, dtype, device)
    with assumed(GPUS["H100"]), dry_run() as record, kernels.backend("triton"):
        kernels.linear(x, weight)
    (launch,) = record.launches
    assert (launch.name, launch.constants["OUTPUTS"]) == ("linear.op.linear_tile", width)
    for added in (None, bias):
        expected = F.linear(x.double(), weight.double(), None if added is None else added.double())
        with assumed(GPUS["H100"]), kernels.backend("triton"), kernels.implementations() as ran:
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


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 64])
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize(("I", "inner"), [(1024, 2816), (1000, 1100), (999, 77), (2816, 512)])
@torch.no_grad()
def test_a_gated_mlp_on_device(rows: int, I: int, inner: int, activation: str):
    x, gate_up, down = mlp_inputs(rows, I, inner, "cuda")
    with kernels.backend("triton"):
        actual = kernels.gated_mlp(x, gate_up, down, activation=activation)
        assert all(torch.equal(kernels.gated_mlp(x, gate_up, down, activation=activation), actual) for _ in range(5))
    with kernels.backend("reference"):
        expected = kernels.gated_mlp(x.float(), gate_up.float(), down.float(), activation=activation)
    assert error(actual, expected) <= 6e-3


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("rows", [1, 2])
@torch.no_grad()
def test_several_products_are_each_alone(rows: int, device: str):
    """Products without an activation are bitwise equal to `linear`; an activation is applied to the rounded product."""
    activations = {"none": lambda y: y, "sigmoid": torch.sigmoid, "tanh": torch.tanh}
    sizes = ((1100, 300, "none"), (20, 7, "sigmoid"), (300, 1025, "tanh"), (2050, 33, "none"))
    parts = [inputs(rows, I, O, device=device)[:2] for I, O, _ in sizes]
    parts[2][0].mul_(1e-3)
    products = [Product(x, w, name) for (x, w), (*_, name) in zip(parts, sizes, strict=True)]
    with kernels.backend("triton"):
        with dry_run() as record:
            few_products(products)
        actual = few_products(products)
        alone = [kernels.linear(x, w) for x, w, _ in products]
    assert [launch.name for launch in record.launches] == ["linear.op.linear_several"]
    for y, z, (*_, name) in zip(actual, alone, sizes, strict=True):
        expected = activations[name](z)
        if name == "none":
            assert torch.equal(y, z)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=0)


def test_products_that_need_another_way():
    x, weight, _ = inputs(1, 20, 7)
    product = Product(x, weight)
    with kernels.backend("torch"), torch.no_grad():
        assert few_products([product]) is None
    with kernels.backend("triton"):
        assert few_products([product._replace(weight=weight.clone().requires_grad_())]) is None
        with torch.no_grad():
            assert few_products([product]) is not None
            assert few_products([product] * 9) is None
            assert few_products([product, product._replace(x=torch.cat([x, x]))]) is None
            assert few_products([product, product._replace(weight=weight.half())]) is None
            assert few_products([product._replace(weight=weight[0, :0])]) is None
            with kernels.deterministic():
                assert few_products([product]) is None
