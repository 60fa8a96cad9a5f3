"""Products in FP8: outputs and gradients against the rounding and the sum of their definition, and what is refused."""

import importlib

import pytest
import torch
from torch import Tensor

import kernels
from kernels.linear import fp8
from mixers import OutputProjection, Projection

from .places import PLACES

EPSILON = 2.0**-4  # relative rounding error of one number with three bits of mantissa


def rounded(x: Tensor) -> Tensor:
    """Each row of x [M,K] in fp64, rounded to three bits of mantissa where its largest magnitude is 448."""
    rows = []
    for row in x.double():
        scale = row.abs().max() / 448
        y = row / scale
        exponent = torch.floor(torch.log2(y.abs().clamp(min=2.0**-6)))
        unit = 2.0 ** (exponent - 3)
        rows.append((y / unit).round() * unit * scale)
    return torch.stack(rows)


def expected(x: Tensor, weight: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y, dx and dW of rounded factors, each rounded along the axis that is summed over."""
    return {
        "y": rounded(x) @ rounded(weight).T,
        "x": rounded(dy) @ rounded(weight.T).T,
        "weight": rounded(dy.T) @ rounded(x.T).T,
    }


def error(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


def inputs(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x and dy in bf16 with rows and columns of very different sizes, and a weight."""
    generator = torch.Generator().manual_seed(0)
    x, weight, dy = (torch.randn(shape, generator=generator) for shape in ((48, 256), (320, 256), (48, 320)))
    x, dy = x * torch.logspace(-6, 3, 48)[:, None], dy * torch.logspace(-9, -5, 320)
    return x.bfloat16().to(device), (weight / 16).to(device, dtype), dy.bfloat16().to(device)


def results(x: Tensor, weight: Tensor, dy: Tensor, bias: Tensor | None = None) -> dict[str, Tensor]:
    leaves = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    with kernels.fp8(), kernels.implementations() as ran, torch.autocast(x.device.type, torch.bfloat16):
        y = kernels.linear(**leaves)
    assert "fp8_product" in ran
    gradients = torch.autograd.grad(y, list(leaves.values()), dy)
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_the_rounding_and_the_sum_of_the_definition(backend: str, dtype: torch.dtype):
    x, weight, dy = inputs(dtype)
    with kernels.backend(backend):
        actual = results(x, weight, dy)
    for name, wanted in expected(x, weight, dy).items():
        assert error(actual[name], wanted) <= 5e-3, (
            name
        )  # the result is rounded to bf16, and ties of the weight either way
    assert (actual["y"].dtype, actual["x"].dtype, actual["weight"].dtype) == (torch.bfloat16, torch.bfloat16, dtype)


def test_the_error_against_bf16():
    x, weight, dy = inputs()
    x, dy = x / x.abs().amax(1, keepdim=True), torch.randn_like(dy)
    actual = results(x, weight, dy)
    wide = x.double(), weight.double(), dy.double()
    exact = {"y": wide[0] @ wide[1].T, "x": wide[2] @ wide[1], "weight": wide[2].T @ wide[0]}
    for name, wanted in exact.items():
        assert 0.01 < error(actual[name], wanted) < EPSILON, name


def test_a_bias():
    x, weight, dy = inputs()
    bias = torch.randn(320)
    actual, without = results(x[None], weight, dy[None], bias), results(x, weight, dy)
    assert error(actual["y"][0], without["y"] + bias) < 5e-3
    assert error(actual["bias"], dy.double().sum(0)) < 5e-3


@pytest.mark.parametrize("backend", ["torch", "reference", "triton"])
def test_the_gated_product(backend: str, monkeypatch: pytest.MonkeyPatch):
    if backend == "triton":
        if torch.cuda.is_available():
            pytest.skip("for the interpreter")
        # the interpreter of Triton loses carries when it rounds to FP8
        monkeypatch.setattr(importlib.import_module("kernels.linear.gpu.fp8"), "scaled", fp8.scaled)
    generator = torch.Generator().manual_seed(0)
    gate_up, weight = (torch.randn(shape, generator=generator) for shape in ((16, 2 * 256), (272, 256)))
    leaves = [gate_up.bfloat16().requires_grad_(), weight.requires_grad_()]
    with kernels.backend(backend), torch.autocast("cpu", torch.bfloat16):
        with kernels.fp8(), kernels.implementations() as ran, kernels.recomputing():
            y = kernels.gated_linear(*leaves)
        assert ran == {"gated_linear": {backend}, "fp8_product": {backend}}
        dy = torch.randn(y.shape, generator=generator).bfloat16()
        actual = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
        y = kernels.gated_linear(*leaves)
        plain = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    gate, up = leaves[0].detach().chunk(2, -1)
    assert error(actual[0], rounded(torch.nn.functional.silu(gate) * up) @ rounded(leaves[1].detach()).T) < 0.02
    for x, wanted in zip(actual, plain, strict=True):
        assert x.dtype == wanted.dtype
        assert 0.01 < error(x, wanted) < EPSILON


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("shape", [(3, 16), (130, 80), (3, 4112)])
@pytest.mark.parametrize("transposed", [False, True])
def test_scaling_in_triton(transposed: bool, shape: tuple[int, int], device: str):
    gpu = pytest.importorskip("kernels.linear.gpu.fp8")
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-15, 16, shape, generator=generator).float()  # numbers of FP8, at these scales
    values[:, 0] = 14.0 * 32
    x = values * 2.0 ** torch.randint(-20, 20, (shape[0], 1), generator=generator)
    x[1] = 0
    wide = torch.nn.functional.pad(x.T if transposed else x, (0, 16)).bfloat16().to(device)  # rows with a stride
    x = wide[:, : shape[0]].T if transposed else wide[:, : shape[1]]
    (y, scales), (wanted, wanted_scales) = gpu.scaled(x), fp8.scaled(x)
    assert y.is_contiguous()
    assert torch.equal(scales, wanted_scales)
    assert torch.equal(y.float(), wanted.float())


def test_rows_that_are_not_finite_are_not_hidden():
    x = torch.ones(16, 256)
    x[3, 5], x[4, 6] = torch.inf, torch.nan
    with kernels.fp8():
        y = kernels.linear(x, torch.ones(256, 256))
    assert y.isfinite().all(1).tolist() == [row not in (3, 4) for row in range(16)]


def test_only_large_maps_run_in_fp8():
    torch.manual_seed(0)
    projection = Projection(256, {"q": 256, "gate": 8, "k": 320, "decay": 128}, bias=True)
    torch.nn.init.normal_(projection.bias)
    x = torch.randn(16, 256)
    plain = projection(x)
    with kernels.fp8():
        outputs = projection(x)
        small = OutputProjection(128, 256)
        assert torch.equal(small(x[:, :128]), torch.nn.functional.linear(x[:, :128], small.weight))
    assert [each.shape for each in outputs] == [each.shape for each in plain]
    for name, actual, wanted in zip(projection.widths, outputs, plain, strict=True):
        if name in ("q", "k"):
            assert 0.01 < error(actual, wanted) < EPSILON
        else:
            torch.testing.assert_close(actual, wanted)
    sum(each.sum() for each in outputs).backward()
    assert projection.weight.grad.norm(dim=1).min() > 0


def test_a_call_without_it_is_untouched():
    x, weight, _ = inputs(torch.bfloat16)
    with kernels.fp8(), kernels.fp8(False):
        assert torch.equal(kernels.linear(x, weight), torch.nn.functional.linear(x, weight))
    assert torch.equal(kernels.linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "sentence"),
    [
        (17, 256, 256, "^fp8: 17 tokens in a batch are not a multiple of 16"),
        (16, 264, 256, "^fp8: a linear map of 264 to 256 channels; both must be multiples of 16"),
        (16, 256, 300, "^fp8: a linear map of 256 to 300 channels; both must be multiples of 16"),
    ],
)
def test_sizes_without_fp8(rows: int, inputs: int, outputs: int, sentence: str):
    with kernels.fp8(), pytest.raises(kernels.UserError, match=sentence):
        kernels.linear(torch.zeros(rows, inputs), torch.zeros(outputs, inputs))


def test_modes_and_devices_without_fp8(monkeypatch: pytest.MonkeyPatch):
    with kernels.fp8(), kernels.deterministic(), pytest.raises(kernels.UserError, match=r"^fp8: true does not cover"):
        kernels.linear(torch.zeros(16, 256), torch.zeros(256, 256))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(kernels.UserError, match=r"^fp8: true needs an NVIDIA GPU of compute .* NVIDIA A100 has 8\.0$"):
        fp8.check_device(torch.device("cuda", 77))
    with pytest.raises(kernels.UserError, match=r"^fp8: true needs an NVIDIA GPU, or a CPU to try it out, not mps$"):
        fp8.check_device(torch.device("mps"))


def test_the_op_is_registered_properly():
    x, weight, _ = inputs(torch.bfloat16)
    arguments = (x.requires_grad_(), weight.requires_grad_(), None, "torch", False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.token_mixer_zoo.fp8_linear, arguments, test_utils=checks)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_device(dtype: torch.dtype):
    x, weight, dy = inputs(dtype, "cuda")
    actual = results(x, weight, dy)
    for name, wanted in expected(x, weight, dy).items():
        assert error(actual[name], wanted) <= 1e-2, name  # fast accumulation keeps 14 bits
    repeat = results(x, weight, dy)
    assert all(torch.equal(actual[name], repeat[name]) for name in actual)
