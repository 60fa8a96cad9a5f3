"""RMS normalisation and LayerNorm, alone, gated and added: by the formulas, and in Triton."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.norm import add_layer_norm, layer_norm

from .op_contract import DEVICE, OpContract, SeveralResults, Tensors, interpreted

GATES = ("none", "last", "first", "sigmoid last", "sigmoid first")
LAYER = "layer norm"  # not a gate
SLOW = pytest.mark.slow
SHAPES = ((5,), (1, 2), (3, 64), (2, 5, 3, 24), (300, 128), (130, 1025), (3, 2, 2050), (1, 8192))
OF_TRAINING = ((8, 4096, 8, 128), (3, 1001, 5, 64), (3, 1001, 2, 256), (8, 4096, 1024), (8, 1001, 2048))
OF_TRAINING += ((3, 1101, 4096), (1, 501, 8192))


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    return y if weight is None else y * weight


class TestNorm(OpContract):
    op = "rms_norm"
    # shape, gate, whether it has a weight, and eps
    sizes = (
        *(((2, 3, 7), gate, weighted, eps) for gate in GATES for weighted in (True, False) for eps in (1e-6, 0.5)),
        # 300 rows are more than all programs take at once, and 130 long ones so many programs that none starts early
        *(pytest.param((shape, "last", True, 1e-5), marks=SLOW) for shape in SHAPES),
        *((shape, LAYER, True, 1e-5) for shape in ((5,), (2, 3, 7), (3, 1025), (30, 64))),
    )
    some_sizes = ((2, 3, 8), "last", True, 0.1)
    formula_sizes = tuple(((2, 3, 7), gate, gate != "first", eps) for gate in (*GATES, LAYER) for eps in (1e-6, 0.5))
    low_sizes = tuple(((4, 9, 64), gate, True, 1e-5) for gate in (*GATES, LAYER))
    device_sizes = tuple((shape, gate, True, 1e-5) for shape in OF_TRAINING for gate in GATES)
    low = ("x", "gate", "y")
    halves = (torch.bfloat16, torch.float16)
    exact = torch.float64
    tolerances = (1e-4, 1e-5)
    rounded_once = ()
    device_tolerance = 1e-5
    low_norms = (5e-3, 1e-2)
    repeats = 20
    interpreted_only = True
    gate, eps = "last", 1e-5  # of the inputs
    fitting = ((2, 8), "first", True, 0.1)
    misfits = (
        ({"x": torch.zeros(2, 8).long()}, "x: expected a floating"),
        ({"weight": torch.ones(1)}, "weight: "),
        ({"weight": torch.ones(2, 8)}, "weight: "),
        ({"gate": torch.zeros(8)}, "gate: "),
        ({"activation": "tanh"}, "activation: 'tanh' is not one of silu, sigmoid$"),
    )
    refused = (
        (((1, 8193), "none", True, 1e-5), "rows of at most 8192"),
        (((1, 8), "none", True, 1e-5, torch.float64), "fp64"),
    )

    def inputs(
        self, shape: tuple[int, ...], gate: str, weighted: bool, eps: float, dtype: torch.dtype = torch.float32
    ) -> Tensors:
        """x, a gate that is columns of a projection, a weight, and of LayerNorm a bias and a mean of x."""
        self.gate, self.eps = gate, eps
        tensors = {"x": torch.randn(shape) + 3 * (gate == LAYER)}
        if gate not in ("none", LAYER):
            outer, heads = shape[:2] if len(shape) > 2 else shape[:-1], shape[2 if len(shape) > 2 else -1 :]
            wide = torch.randn(*outer, 3 * torch.Size(heads).numel(), device=DEVICE)
            tensors["gate"] = wide.chunk(3, -1)[1].unflatten(-1, heads)
        if weighted:
            tensors["weight"] = torch.randn(shape[-1])
        if gate == LAYER:
            tensors["bias"] = torch.randn(shape[-1])
        return {name: x.to(DEVICE, dtype) for name, x in tensors.items()}

    def call(self, **tensors: Any) -> Tensor:
        if self.gate == LAYER:
            return layer_norm(**tensors, eps=self.eps)
        if self.gate == "none":
            return kernels.rms_norm(**tensors, eps=self.eps)
        how = {"gate_first": self.gate.endswith("first"), "activation": self.activation, "eps": self.eps}
        return kernels.gated_rms_norm(**how | tensors)

    @property
    def activation(self) -> str:
        return "sigmoid" if self.gate.startswith("sigmoid") else "silu"

    def formula(self, x, gate=1, weight=None, bias=None) -> Tensor:
        if self.gate == LAYER:
            return normed(x - x.mean(-1, keepdim=True), weight, self.eps) + bias
        if self.gate == "none":
            return normed(x, weight, self.eps)
        opened = torch.sigmoid(gate) if self.activation == "sigmoid" else gate * torch.sigmoid(gate)
        first = self.gate.endswith("first")
        return normed(x * opened, weight, self.eps) if first else normed(x, weight, self.eps) * opened

    def registered(self, tensors: Tensors) -> Any:
        x, gate, weight = tensors.values()
        bias = weight.detach().clone().requires_grad_()
        for arguments in ((x, gate, weight, None), (x, None, None, None), (x, None, weight, bias)):
            for how in ((True, "silu"), (False, "sigmoid")):
                yield *arguments, 1e-5, *how, torch.float32, False

    @interpreted
    @pytest.mark.parametrize("gate", ["last", "first"])
    def test_views_of_one_projection(self, gate: str):
        self.gate = gate
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
        for name, (part, gates) in views.items():
            actual = self.results({"x": part, "gate": gates, "weight": weight}, "triton")
            copies = {"x": part.contiguous(), "gate": gates.contiguous(), "weight": weight}
            expected = self.results(copies, "triton")
            assert all(torch.equal(actual[n], expected[n]) for n in expected), name

    @pytest.mark.parametrize("backend", ["torch", "triton"])
    @pytest.mark.parametrize("gate", ["none", "last"])
    def test_zeros_stay_zero(self, gate: str, backend: str):
        tensors = self.inputs((2, 8), gate, True, 1e-5)
        actual = self.results(tensors | {"x": torch.zeros_like(tensors["x"])}, backend)
        assert not actual["y"].any()
        assert all(x.isfinite().all() for x in actual.values())

    @interpreted
    def test_everything_in_bf16(self):
        tensors = {name: x.bfloat16() for name, x in self.inputs((4, 9, 64), "last", True, 1e-5).items()}
        exact = self.results({name: x.double() for name, x in tensors.items()}, "reference")
        for name, x in self.results(tensors, "triton").items():
            assert x.dtype == torch.bfloat16
            assert (x - exact[name]).norm() <= (5e-3 if name == "y" else 1e-2) * exact[name].norm(), name


class TestAddedNorm(SeveralResults):
    op = "rms_norm"
    outputs = ("total", "h")
    # shape, and whether it is LayerNorm
    sizes = (
        *(pytest.param((shape, False), marks=SLOW) for shape in ((3, 7), (2, 5, 64), (1, 3000))),
        ((2, 5, 64), True),
    )
    some_sizes = ((2, 3, 8), False)
    formula_sizes = (((2, 3, 7), False), ((2, 3, 7), True))
    low_sizes = (((4, 50), False), ((4, 50), True))
    device_sizes = (((4, 1000, 1024), False), ((4, 1000, 1024), True))
    low = ("x", "y", "total", "h")
    exact = torch.float64
    tolerances = (1e-4, 2e-5)
    rounded_once = ()
    low_norms = (5e-3, 1e-2)
    interpreted_only = True
    layer = False  # of the inputs

    def inputs(self, shape: tuple[int, ...], layer: bool) -> Tensors:
        self.layer = layer
        learned = dict(zip(("weight", "bias"), torch.randn(1 + layer, shape[-1]), strict=False))
        tensors = {"x": torch.randn(shape), "y": torch.randn(shape), **learned}
        return {name: x.to(DEVICE) for name, x in tensors.items()}

    def call(self, **tensors: Tensor) -> tuple[Tensor, Tensor]:
        return (add_layer_norm if self.layer else kernels.add_rms_norm)(**tensors, eps=1e-5)

    def formula(self, x, y, weight, bias=0) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, normed(total - total.mean(-1, keepdim=True) * self.layer, weight, 1e-5) + bias

    test_the_op_is_registered_properly = None  # it is that of `TestNorm`

    @interpreted
    def test_an_addition_of_lower_precision(self):
        tensors = self.inputs((4, 50), False)
        tensors["y"] = tensors["y"].bfloat16()
        actual = self.results(tensors, "triton")
        assert {name for name, x in actual.items() if x.dtype == torch.bfloat16} == {"dy"}
        for name, x in self.results({name: x.float() for name, x in tensors.items()}, "reference").items():
            torch.testing.assert_close(actual[name].float(), x, atol=1e-2 if name == "dy" else 1e-5, rtol=1e-2)

    @pytest.mark.gpu
    @pytest.mark.parametrize("layer", [True, False])
    def test_a_sum_in_fp32_and_an_addend_in_bf16_on_device(self, layer: bool):
        """The residual stream in fp32, what is added in bf16."""
        tensors = self.inputs((4, 1000, 1024), layer)
        tensors["y"] = tensors["y"].bfloat16()
        exact = self.results({name: x.double() for name, x in tensors.items()}, "torch")
        for name, x in self.results(tensors, "triton").items():
            tolerance = 5e-3 if name in self.outputs else 1e-2
            assert (x - exact[name]).norm() <= tolerance * exact[name].norm(), name


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gradients(activation: str, gate_first: bool):
    x, gate = torch.randn(2, 4, 5, dtype=torch.float64)
    weight = torch.randn(5, dtype=torch.float64)
    arguments = [t.requires_grad_() for t in (x.clone(), gate.clone(), weight)]
    how = {"gate_first": gate_first, "activation": activation}
    assert torch.autograd.gradcheck(lambda *a: kernels.gated_rms_norm(*a, **how), arguments)


def test_bf16_is_computed_in_fp32():
    # the result is the fp32 one, rounded once
    x, gate, weight = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    exact = [t.float() for t in (x, gate, weight)]
    assert torch.equal(kernels.rms_norm(x, weight), kernels.rms_norm(exact[0], exact[2]).bfloat16())
    for first, activation in itertools.product((True, False), ("silu", "sigmoid")):
        how = {"gate_first": first, "activation": activation}
        actual = kernels.gated_rms_norm(x, gate, weight, **how)
        assert torch.equal(actual, kernels.gated_rms_norm(*exact, **how).bfloat16())


def test_weights_may_have_another_dtype():
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(8)
    assert kernels.rms_norm(x, weight).dtype == torch.bfloat16
    x = torch.randn(4, 8, dtype=torch.float64)
    assert kernels.gated_rms_norm(x, x, weight).dtype == torch.float64


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_a_single_vector(gated: bool):
    x, weight = torch.randn(8).requires_grad_(), torch.randn(8).requires_grad_()
    y = [kernels.gated_rms_norm(z, z, weight) if gated else kernels.rms_norm(z, weight) for z in (x, x[None])]
    for actual, expected in zip(*(torch.autograd.grad(z.square().sum(), [x, weight]) for z in y), strict=True):
        torch.testing.assert_close(actual, expected)


def test_arguments_of_other_norms():
    with pytest.raises(ValueError, match=r"^x: expected a floating"):
        kernels.rms_norm(torch.zeros(()))
    with pytest.raises(ValueError, match=r"^bias: expected \[8\]"):
        layer_norm(torch.zeros(2, 8), torch.ones(8), torch.ones(7))


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
    gpu_op = pytest.importorskip("kernels.norm.gpu.op")
    assert gpu_op.walk(size, row, gated) == expected


def test_only_short_kernels_start_early():
    gpu_op = pytest.importorskip("kernels.norm.gpu.op")
    few, many = (gpu_op.launch(None, rows, 1, 1024, "none", "silu", 1024, 0, 1e-5) for rows in (64, 4096))
    assert few.overlap
    assert not many.overlap


@interpreted
def test_gradients_may_be_views():
    x = torch.randn(4, 8, requires_grad=True)
    with kernels.backend("triton"):
        y = kernels.rms_norm(x)
    arriving = torch.randn(8, 4).T
    actual = [torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in (arriving, arriving.contiguous())]
    assert torch.equal(*actual)


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
