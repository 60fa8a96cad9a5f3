"""The Triton kernels of RMS normalisation and LayerNorm: small cases in the interpreter, real sizes on a device."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.norm import add_layer_norm, layer_norm

from .comparisons import DEVICE, assert_repeats, interpreted

pytest.importorskip("triton")
from kernels.norm.gpu import op as gpu_op

pytestmark = pytest.mark.usefixtures("poison")

GATES = ("none", "last", "first", "sigmoid last", "sigmoid first")
LAYER = "layer norm"  # not a gate
Arguments = dict[str, Tensor]


def inputs(*shape: int, gate: str = "last", weight: bool = True) -> Arguments:
    a = {"x": torch.randn(shape)}
    if gate not in ("none", LAYER):
        a["gate"] = torch.randn(shape)
    if weight:
        a["weight"] = torch.randn(shape[-1])
    if gate == LAYER:
        a["bias"] = torch.randn(shape[-1])
    return a


def how(gate: str) -> dict[str, Any]:
    return {"gate_first": gate.endswith("first"), "activation": "sigmoid" if gate.startswith("sigmoid") else "silu"}


def results(a: Arguments, backend: str, gate: str = "last", eps: float = 1e-5) -> Arguments:
    """y and the gradients of all arguments."""
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    with kernels.backend(backend):
        if gate == LAYER:
            y = layer_norm(**leaves, eps=eps)
        elif gate == "none":
            y = kernels.rms_norm(**leaves, eps=eps)
        else:
            y = kernels.gated_rms_norm(**leaves, eps=eps, **how(gate))
    generator = torch.Generator(y.device).manual_seed(1)
    arriving = torch.randn(y.shape, generator=generator, device=y.device).bfloat16().to(y)
    gradients = torch.autograd.grad(y, list(leaves.values()), arriving)
    return {"y": y.detach(), **{f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}}


def agree(
    a: Arguments, output: float = 1e-5, gradient: float = 1e-5, *, backend: str = "reference", **options: Any
) -> Arguments:
    """The results on Triton, after they have been compared in fp64, relative to their norms."""
    actual = results(a, "triton", **options)
    expected = results({name: x.double() for name, x in a.items()}, backend, **options)
    for name, x in expected.items():
        assert actual[name].dtype == a[name.rpartition(" ")[2] if name != "y" else "x"].dtype
        assert actual[name].isfinite().all(), f"{name} is not finite"
        error = float((actual[name].double() - x.double()).norm() / x.double().norm())
        assert error <= (output if name == "y" else gradient), f"{name}: {error:.2g}"
    return actual


@interpreted
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_gates(gate: str, weight: bool, eps: float):
    agree(inputs(2, 3, 7, gate=gate, weight=weight), gate=gate, eps=eps)


@interpreted
@pytest.mark.parametrize("shape", [(5,), (2, 3, 7), (3, 1025), (30, 64)])
def test_layer_norm(shape: tuple[int, ...]):
    a = inputs(*shape, gate=LAYER)
    a["x"] += 3
    agree(a, gate=LAYER, gradient=2e-5)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(
    "shape", [(5,), (1, 2), (3, 64), (2, 5, 3, 24), (300, 128), (130, 1025), (3, 2, 2050), (1, 8192)]
)
def test_shapes(shape: tuple[int, ...]):
    # 300 rows are more than all programs take at once, and 130 long ones so many programs that none starts early
    agree(inputs(*shape))


@pytest.mark.parametrize(
    ("size", "row", "gated", "expected"),
    [
        (1024, 2048, False, (8, 3)),
        (1025, 2050, False, (12, 1)),
        (1024, 8192, True, (8, 2)),
        (1025, 2050, True, (8, 3)),
        (2048, 8192, True, (8, 3)),
        (4097, 8194, True, (6, 1)),
    ],
)
def test_walks(size: int, row: int, gated: bool, expected: tuple[int, int]):
    """Pipelines of long rows would not fit into the shared memory of small GPUs."""
    assert gpu_op.walk(size, row, gated) == expected


def test_only_short_kernels_start_early():
    few, many = (gpu_op.launch(None, rows, 1, 1024, "none", "silu", 1024, 0, 1e-5) for rows in (64, 4096))
    assert few.overlap
    assert not many.overlap


@interpreted
@pytest.mark.parametrize("gate", [*GATES, LAYER])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, gate: str):
    a = inputs(4, 9, 64, gate=gate)
    agree({name: x if name in ("weight", "bias") else x.to(dtype) for name, x in a.items()}, 5e-3, 1e-2, gate=gate)


@interpreted
def test_everything_in_bf16():
    agree({name: x.bfloat16() for name, x in inputs(4, 9, 64).items()}, 5e-3, 1e-2)


@interpreted
@pytest.mark.parametrize("gate", ["last", "first"])
def test_views_of_one_projection(gate: str):
    fused, x, weight = torch.randn(2, 5, 50), torch.randn(2, 5, 3, 8), torch.randn(8)
    heads = fused[..., 10:34].unflatten(-1, (3, 8))
    views = {
        "heads": (x, heads),
        "both": (fused[..., 26:].unflatten(-1, (3, 8)), heads),
        "rows": (x[:, :, 0], fused[..., 3:11]),
        "transposed": (x.transpose(1, 2), heads.transpose(1, 2)),
        "every other": (x, fused[..., :48].unflatten(-1, (3, 16))[..., ::2]),
        "one row": (x[0, 0, 0], fused[0, 0, 5:13]),
    }
    for name, (arguments, gates) in views.items():
        actual = results({"x": arguments, "gate": gates, "weight": weight}, "triton", gate)
        expected = results({"x": arguments.contiguous(), "gate": gates.contiguous(), "weight": weight}, "triton", gate)
        assert all(torch.equal(actual[n], expected[n]) for n in expected), name


@interpreted
def test_gradients_may_be_views():
    x = torch.randn(4, 8, requires_grad=True)
    with kernels.backend("triton"):
        y = kernels.rms_norm(x)
    arriving = torch.randn(8, 4).T
    actual = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in (arriving, arriving.contiguous())]
    assert torch.equal(*actual)


@interpreted
def test_zeros_stay_zero():
    actual = results({"x": torch.zeros(2, 8), "gate": torch.randn(2, 8)}, "triton")
    assert not actual["y"].any()
    assert all(x.isfinite().all() for x in actual.values())


@interpreted
def test_what_the_kernels_cannot_take():
    for x, reason in ((torch.zeros(1, 8193), "rows of at most 8192"), (torch.zeros(1, 8, dtype=torch.float64), "fp64")):
        kernels.rms_norm(x)
        with kernels.backend("triton"), pytest.raises(kernels.UserError, match=reason):
            kernels.rms_norm(x)


@pytest.mark.slow
def test_the_op_is_registered_properly():
    x, gate, weight = (p.to(DEVICE).requires_grad_() for p in inputs(2, 3, 8).values())
    bias = weight.detach().clone().requires_grad_()
    for arguments in ((x, gate, weight, None), (x, None, None, None), (x, None, weight, bias)):
        for options in ((True, "silu"), (False, "sigmoid")):
            torch.library.opcheck(
                torch.ops.token_mixer_zoo.rms_norm, (*arguments, 1e-5, *options, torch.float32, False)
            )


def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16, gate: str = "last") -> Arguments:
    """As mixers make them: the weight in fp32, the gate a view of a projection."""
    a = {name: x.cuda() for name, x in inputs(*shape, gate=gate).items()}
    a["x"] = a["x"].to(dtype)
    if gate != "none":
        wide = torch.cat([a["gate"].flatten(2)] * 3, -1).to(dtype)
        a["gate"] = wide.chunk(3, -1)[1].unflatten(-1, shape[2:])
    return a


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "shape",
    [
        (8, 4096, 8, 128),
        (3, 1001, 5, 64),
        (3, 1001, 2, 256),
        (8, 4096, 1024),
        (8, 1001, 2048),
        (3, 1101, 4096),
        (1, 501, 8192),
    ],
)
def test_real_sizes(shape: tuple[int, ...], gate: str, dtype: torch.dtype):
    a, limits = on_device(*shape, dtype=dtype, gate=gate), (1e-5, 1e-5) if dtype == torch.float32 else (5e-3, 1e-2)
    agree(a, *limits, backend="torch", gate=gate)
    assert_repeats(partial(results, a, "triton", gate))


def added(
    dtype: torch.dtype, other: torch.dtype, *shape: int, through: str = "both", layer: bool = False
) -> dict[str, dict[str, Tensor]]:
    """The sum, its norm (LayerNorm with `layer`), and all gradients, on Triton and in fp32."""
    actual = {}
    x, y, learned = torch.randn(shape).to(dtype), torch.randn(shape).to(other), torch.randn(1 + layer, shape[-1])
    weights = torch.randn(2, *shape).bfloat16()
    for backend in ("triton", "reference"):
        kind = None if backend == "triton" else torch.float32
        leaves = [z.to(DEVICE, kind or z.dtype).requires_grad_() for z in (x, y, *learned)]
        with kernels.backend(backend):
            total, h = (add_layer_norm if layer else kernels.add_rms_norm)(*leaves, 1e-5)
        results = {"both": (total, h), "sum": (total,), "norm": (h,)}[through]
        loss = sum((w.to(DEVICE) * r.float()).sum() for w, r in zip(weights, results, strict=False))
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True)
        names = ("total", "h", "x", "y", "weight", "bias")[: 2 + len(leaves)]
        actual[backend] = dict(zip(names, (total.detach(), h.detach(), *gradients), strict=True))
    return actual


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("through", ["both", "sum", "norm"])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 64), (1, 3000)])
def test_with_an_addition(shape: tuple[int, ...], through: str):
    actual = added(torch.float32, torch.float32, *shape, through=through)
    for name, x in actual["reference"].items():
        torch.testing.assert_close(actual["triton"][name], x, atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("through", ["both", "sum", "norm"])
def test_layer_norm_with_an_addition(through: str):
    actual = added(torch.float32, torch.float32, 2, 5, 64, through=through, layer=True)
    for name, x in actual["reference"].items():
        torch.testing.assert_close(actual["triton"][name], x, atol=2e-5, rtol=1e-5)


@interpreted
def test_with_an_addition_of_lower_precision():
    actual = added(torch.float32, torch.bfloat16, 4, 50)
    assert [x.dtype for x in actual["triton"].values()] == [torch.float32] * 3 + [torch.bfloat16, torch.float32]
    for name, x in actual["reference"].items():
        torch.testing.assert_close(actual["triton"][name].float(), x, atol=1e-2 if name == "y" else 1e-5, rtol=1e-2)


@interpreted
def test_with_an_addition_in_a_chain():
    # the gradient of the sum is that of both its terms: nobody may change it for one of them
    actual = []
    for backend in ("triton", "torch"):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        total, y = x, x.sin()
        with kernels.backend(backend):
            for _ in range(3):
                total, y = kernels.add_rms_norm(total, y)
        actual.append(torch.autograd.grad((total * y).sum(), x)[0])
    torch.testing.assert_close(*actual)


@pytest.mark.gpu
@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("other", [torch.bfloat16, torch.float32])
def test_with_an_addition_on_device(other: torch.dtype, layer: bool):
    # the residual stream in fp32 or bf16, what is added in bf16
    found = added(other, torch.bfloat16, 4, 1000, 1024, layer=layer)
    for name, x in found["reference"].items():
        error = float((found["triton"][name].double() - x.double()).norm() / x.double().norm())
        assert error <= (5e-3 if name in ("total", "h") else 1e-2), f"{name}: {error:.2g}"
