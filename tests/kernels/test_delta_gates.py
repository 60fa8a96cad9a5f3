"""Decay and β of the gated delta rule: by the formulas, and in Triton."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.delta_gates import channel_decay

from .test_discretise import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that reading unwritten memory shows."""
    module = pytest.importorskip("kernels.delta_gates.gpu.op")
    allocate = module.new
    monkeypatch.setattr(module, "new", lambda *arguments, **options: allocate(*arguments, **options).fill_(torch.nan))


def inputs(*shape: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> dict[str, Tensor]:
    made = {name: 5 * torch.randn(shape, dtype=dtype) for name in ("a", "b")}
    for x in made.values():
        x.view(-1)[:3] = torch.tensor([100.0, -100.0, 0.0])[: x.numel()]  # exponentials would overflow
    names = ("A_log", "dt_bias", "bias") if bias else ("A_log", "dt_bias")
    return {name: x.to(DEVICE) for name, x in (made | {name: torch.randn(shape[-1]) for name in names}).items()}


def per_channel(*shape: int, rank: int = 0, dtype: torch.dtype = torch.float32, bias: bool = True) -> dict[str, Tensor]:
    """Inputs for decays [*shape], the last axis of which are channels; with a rank, of inputs of that size."""
    a = inputs(*shape[:-1], dtype=dtype, bias=bias)
    a |= {"a": 5 * torch.randn(shape, dtype=dtype).to(DEVICE), "dt_bias": torch.randn(shape[-2:]).to(DEVICE)}
    if not rank:
        return a
    up = torch.randn(shape[-2] * shape[-1], rank).to(dtype) / rank**0.5
    return a | {"a": 5 * torch.randn(*shape[:-2], rank, dtype=dtype).to(DEVICE), "up": up.to(DEVICE)}


def results(
    a: dict[str, Tensor], backend: str, through: str = "both", largest: float = 1.0, lower_bound: float | None = None
) -> dict[str, Tensor]:
    """Both results and all gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in a.items()}
    with kernels.backend(backend):
        log_decay, beta = kernels.delta_gates(**leaves, largest=largest, lower_bound=lower_bound)
    outputs = {"both": [log_decay, beta], "log_decay": [log_decay], "beta": [beta]}[through]
    generator = torch.Generator().manual_seed(0)
    arriving = [torch.randn(x.shape, generator=generator).to(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), arriving, materialize_grads=True)
    return {"log_decay": log_decay.detach(), "beta": beta.detach(), **dict(zip(a, gradients, strict=True))}


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("bias", [True, False])
def test_by_the_formulas(bias: bool, backend: str):
    a = inputs(3, 4, 5, bias=bias)
    with kernels.backend(backend):
        log_decay, beta = kernels.delta_gates(**a, largest=2)
    torch.testing.assert_close(log_decay, -a["A_log"].exp() * F.softplus(a["a"] + a["dt_bias"]))
    torch.testing.assert_close(beta, 2 * torch.sigmoid(a["b"] + a.get("bias", 0)))
    wide = {name: x.double() if name in "ab" else x for name, x in a.items()}
    assert [x.dtype for x in kernels.delta_gates(**wide)] == [torch.float64, torch.float64]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("rank", [0, 6])
def test_decays_per_channel_by_the_formulas(rank: int, backend: str):
    a = per_channel(3, 4, 5, 2, rank=rank)
    raw = (a["a"] @ a["up"].T).view(3, 4, 5, 2) if rank else a["a"]
    with kernels.backend(backend):
        log_decay, beta = kernels.delta_gates(**a)
    torch.testing.assert_close(log_decay, -a["A_log"].exp()[:, None] * F.softplus(raw + a["dt_bias"]))
    torch.testing.assert_close(beta, torch.sigmoid(a["b"] + a["bias"]))
    with kernels.backend(backend):
        log_decay, _ = kernels.delta_gates(**a, lower_bound=-3)
    bounded = -3 * torch.sigmoid(a["A_log"].exp()[:, None] * (raw + a["dt_bias"]))
    torch.testing.assert_close(log_decay, bounded)


@interpreted
@pytest.mark.parametrize("through", ["both", "log_decay", "beta"])
@pytest.mark.parametrize(
    ("shape", "rank", "bias"), [((2, 7, 3, 5), 0, True), ((5, 3, 8), 6, False), ((2, 2, 1), 0, True)]
)
def test_decays_per_channel_in_triton(shape: tuple[int, ...], rank: int, bias: bool, through: str):
    a = per_channel(*shape, rank=rank, bias=bias)
    for how in ((2.0, None), (1.0, -4.0)):
        assert_close(results(a, "triton", through, *how), results(a, "reference", through, *how), 1e-5)


@interpreted
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_decays_per_channel_alone(backend: str):
    a = per_channel(2, 7, 3, 5)
    leaves = [a[name].requires_grad_() for name in ("a", "A_log", "dt_bias")]
    actual = []
    for one in (backend, "reference"):
        with kernels.backend(one):
            y = channel_decay(*leaves)
        actual.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
    torch.testing.assert_close(*actual)


@pytest.mark.parametrize("through", ["both", "log_decay", "beta"])
def test_gradients_in_pytorch(through: str):
    a = inputs(2, 70, 5)
    assert_close(results(a, "torch", through, 2.0), results(a, "reference", through, 2.0), 1e-5)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("through", ["both", "log_decay", "beta"])
@pytest.mark.parametrize(
    ("shape", "bias"), [((1, 1), True), ((2, 70, 5), False), ((3, 400, 8), True), ((9, 100), True)]
)
def test_triton(shape: tuple[int, ...], bias: bool, through: str):
    a = inputs(*shape, bias=bias)
    assert_close(results(a, "triton", through, 2.0), results(a, "reference", through, 2.0), 1e-5)


@interpreted
def test_columns_of_a_projection_in_half_precision():
    fused = torch.randn(2, 30, 20).bfloat16()
    a = inputs(8) | {"a": fused[..., 3:11], "b": fused[..., 11:19]}
    actual, expected = results(a, "triton"), results(a, "reference")
    assert [x.dtype for x in actual.values()] == [x.dtype for x in expected.values()]
    assert_close(actual, expected, 1e-2)


@interpreted
@pytest.mark.parametrize("low", [("A_log",), ("dt_bias",), ("bias",), ("A_log", "dt_bias")], ids=str)
def test_parameters_of_different_precision(low: tuple[str, ...]):
    a = inputs(2, 70, 8)
    a |= {name: a[name].bfloat16() for name in low}
    actual, expected = results(a, "triton"), results(a, "reference")
    for name in low:
        assert actual.pop(name).dtype == expected.pop(name).dtype == torch.bfloat16
    assert_close(actual, expected, 1e-5)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("bias", [True, False])
def test_the_op_is_registered_properly(bias: bool, monkeypatch: pytest.MonkeyPatch):
    a = inputs(3, 4, bias=bias)
    results(a, "triton")
    monkeypatch.undo()
    arguments = [a[name].requires_grad_() if name in a else None for name in ("a", "A_log", "dt_bias", "b", "bias")]
    torch.library.opcheck(torch.ops.token_mixer_zoo.delta_gates, (*arguments, 2.0, 0.0, False))
    a = per_channel(3, 4, 2, bias=bias)
    arguments = [a[name].requires_grad_() if name in a else None for name in ("a", "A_log", "dt_bias", "b", "bias")]
    torch.library.opcheck(torch.ops.token_mixer_zoo.delta_gates, (*arguments, 2.0, 0.0, False))
    arguments[3:] = None, None
    torch.library.opcheck(torch.ops.token_mixer_zoo.delta_gates, (*arguments, 1.0, -5.0, False))


@pytest.mark.parametrize(
    ("name", "said"),
    [("A_log", r"A_log: expected \[3\], got shape \(2,\)"), ("bias", r"bias: expected \[3\], got shape \(2,\)")],
)
def test_parameters_that_do_not_fit(name: str, said: str):
    a = inputs(4, 3) | {name: torch.zeros(2)}
    with pytest.raises(ValueError, match=f"^{said}"):
        kernels.delta_gates(**a)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("dt_bias", (3, 3), r"dt_bias: expected \[4, 2\], got shape \(3, 3\)"),
        ("A_log", (2,), r"A_log: expected \[4\], got shape \(2,\)"),
        ("b", (3, 5), r"b: expected shape \(3, 4\), got \(3, 5\)"),
        ("up", (8, 6), r"up: expected \[8, 2\], got shape \(8, 6\)"),
    ],
)
def test_decays_per_channel_that_do_not_fit(name: str, shape: tuple[int, ...], said: str):
    a = per_channel(3, 4, 2) | {name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=f"^{said}"):
        kernels.delta_gates(**a)


def test_inputs_of_two_shapes():
    a = inputs(4, 3) | {"b": torch.zeros(5, 3)}
    with pytest.raises(ValueError, match=r"^b: expected the shape of a \(4, 3\), got \(5, 3\)"):
        kernels.delta_gates(**a)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "bias"), [((1, 1), False), ((64, 1), True), ((4, 4097), True), ((4, 4097), False)])
def test_on_device(rows: tuple[int, ...], bias: bool, dtype: torch.dtype):
    a = inputs(*rows, 48, dtype=dtype, bias=bias)
    exact = {name: x.float() for name, x in a.items()}
    actual, expected = results(a, "triton"), results(exact, "reference")
    assert_close(actual, expected, 1e-2 if dtype == torch.bfloat16 else 1e-5)
    repeated = results(a, "triton")
    assert all(torch.equal(actual[name], repeated[name]) for name in actual)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1, 8, 128), (4, 4097, 8, 128), (2, 1001, 6, 96), (1, 65, 32, 256)])
def test_decays_per_channel_on_device(shape: tuple[int, ...], dtype: torch.dtype):
    a = per_channel(*shape, dtype=dtype)
    exact = {name: x.float() for name, x in a.items()}
    for lower_bound in (None, -5.0):
        how = ("both", 1.0, lower_bound)
        actual, expected = results(a, "triton", *how), results(exact, "reference", *how)
        assert_close(actual, expected, 1e-2 if dtype == torch.bfloat16 else 1e-5)
        repeated = results(a, "triton", *how)
        assert all(torch.equal(actual[name], repeated[name]) for name in actual)
