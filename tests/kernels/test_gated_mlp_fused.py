"""The kernels for Hopper that compute a product of a gated MLP together with what follows it: against fp32."""

import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

pytest.importorskip("triton")
from kernels.gated_linear.gpu import select
from kernels.gpu.device import Gpu, assumed
from kernels.gpu.paths import dry_run

from .comparisons import DEVICE, assert_near
from .comparisons import interpreted as without_a_gpu
from .gluon_interpreter import interpreted
from .hopper import MOST, shared_memory

pytestmark = pytest.mark.usefixtures("poison")

HOPPER = "kernels.gated_linear.gpu.hopper"
MLP = ("x", "gate_up", "down")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fused launches so far: "fused_forward" or "fused_backward". Without a GPU they run step by step."""
    if torch.cuda.is_available():
        module: Any = pytest.importorskip(HOPPER)
    else:
        monkeypatch.setitem(sys.modules, HOPPER, module := interpreted(HOPPER, "gated_product", "gated_gradients"))
        monkeypatch.setattr(select, "runs_gluon", lambda device: True)
    monkeypatch.setattr(select, "TILES", 1)  # also where they are slower
    monkeypatch.setattr(select, "SHORTEST_BACKWARD", 1)
    names: list[str] = []
    for name in ("fused_forward", "fused_backward"):

        def run(*arguments: Any, name: str = name, launch: Callable[..., None] = getattr(module, name)) -> None:
            names.append(name)
            launch(*arguments)

        monkeypatch.setattr(module, name, run)
    return names


def opened(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else gate) * up


def inputs(*rows: int, D: int, I: int, O: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    sizes = {"x": (*rows, D), "gate_up": (2 * I, D), "down": (O, I)}
    tensors = {name: torch.randn(size, device=DEVICE) for name, size in sizes.items()}
    return {name: (x if name == "x" else x / x.shape[1] ** 0.5).to(dtype) for name, x in tensors.items()}


def results(a: dict[str, Tensor], activation: Any = "silu", learned: tuple[str, ...] = MLP, backend: str = "triton"):
    """y of a gated MLP, and the gradients of the tensors that are learned."""
    leaves = {name: x.detach().requires_grad_(name in learned) for name, x in a.items()}
    with kernels.backend(backend):
        y = kernels.gated_mlp(**leaves, activation=activation)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).bfloat16().to(y)
    gradients = torch.autograd.grad(y, [leaves[name] for name in learned], dy)
    return {"y": y.detach(), **dict(zip(learned, gradients, strict=True))}


# rows that are not whole tiles; channels that are not whole steps of the sum; programs without a tile, with one or more
@pytest.mark.slow
@without_a_gpu
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize(("M", "K", "programs"), [(1, 8, 1), (300, 72, 1), (300, 200, 4), (300, 64, 9)])
def test_step_by_step(M: int, K: int, programs: int, activation: str, monkeypatch: pytest.MonkeyPatch):
    module = interpreted(HOPPER, "gated_product", "gated_gradients")
    monkeypatch.setattr(module, "multiprocessors", lambda device: programs)
    I, silu = 256, activation == "silu"
    x, weight = (torch.randn(n, K, dtype=torch.float64) for n in (M, 2 * I))
    expected = (x @ weight.T).requires_grad_()
    gate_up, h = torch.full((M, 2 * I), torch.nan).double(), torch.full((M, I), torch.nan).double()
    for saved in (None, gate_up):
        module.fused_forward(x, weight, saved, h.fill_(torch.nan), silu)
        torch.testing.assert_close(h, opened(expected, activation).detach())
    torch.testing.assert_close(gate_up, expected.detach())

    dy, down = (torch.randn(n, K, dtype=torch.float64) for n in (M, I))
    (gradient,) = torch.autograd.grad(opened(expected, activation), expected, dy @ down.T)
    for recomputed in (torch.full_like(h, torch.nan), None):
        dgate_up = torch.full_like(gate_up, torch.nan)
        module.fused_backward(gate_up, dy, down.T, recomputed, dgate_up, silu)
        torch.testing.assert_close(dgate_up, gradient)
        if recomputed is not None:
            torch.testing.assert_close(recomputed, h)


@without_a_gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("learned", [MLP, ("x",), ("gate_up",), ("down",), ("x", "down")])
def test_the_op_on_a_cpu(learned: tuple[str, ...], recompute: bool, launched: list[str]):
    a = inputs(2, 40, D=72, I=128, O=24)
    expected = results({name: x.float() for name, x in a.items()}, learned=learned, backend="reference")
    with kernels.recomputing(recompute):
        assert_near(results(a, learned=learned), expected, 2e-2)
    # the product that is kept is all that the gradient of the last weight needs
    assert launched == ["fused_forward", "fused_backward"][: 1 if learned == ("down",) and not recompute else 2]


@without_a_gpu
@pytest.mark.parametrize("learned", [MLP, ("x", "down"), ("x", "gate_up")])
@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_saved(recompute: bool, learned: tuple[str, ...], launched: list[str]):
    """Like the two ops: x for the gradient of its weight, and the product for that of the other."""
    a = inputs(80, D=72, I=128, O=24)
    leaves = {name: x.requires_grad_(name in learned) for name, x in a.items()}
    with kernels.backend("triton"), kernels.recomputing() if recompute else nullcontext():
        y = kernels.gated_mlp(**leaves)
    saved = [x.untyped_storage().size() // 2 for x in y.grad_fn.saved_tensors]
    x, product = 80 * 72 if "gate_up" in learned else 1, 80 * 128 if "down" in learned and not recompute else 0
    assert saved == [x, 256 * 72, 24 * 128, 80 * 256, product]


@without_a_gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_x_is_recomputed(recompute: bool, launched: list[str]):
    """Inside `recomputing()`, the result of a norm in front of the MLP is not kept for the backward pass."""
    a, weight = inputs(80, D=72, I=128, O=24), torch.ones(72).bfloat16()
    x, gate_up = a["x"].requires_grad_(), a["gate_up"].requires_grad_()
    with kernels.backend("triton"), kernels.recomputing(recompute):
        normed = kernels.rms_norm(x, weight)
        saved = weakref.ref(normed)
        y = kernels.gated_mlp(normed, gate_up, a["down"])
        del normed
    assert (saved() is None) == recompute
    actual = torch.autograd.grad(y.float().square().sum(), [x, gate_up])
    with kernels.backend("triton"):
        y = kernels.gated_mlp(kernels.rms_norm(x, weight), gate_up, a["down"])
    expected = torch.autograd.grad(y.float().square().sum(), [x, gate_up])
    assert all(torch.equal(x, z) for x, z in zip(actual, expected, strict=True))
    assert launched == ["fused_forward", "fused_backward"] * 2


@without_a_gpu
def test_without_gradients(launched: list[str]):
    a = inputs(80, D=72, I=128, O=24)
    with torch.no_grad(), kernels.backend("triton"):
        y, few = kernels.gated_mlp(**a), kernels.gated_mlp(**a | {"x": a["x"][:3]})
        assert kernels.gated_mlp(**a | {"x": a["x"][:0]}).shape == (0, 24)
    assert launched == ["fused_forward"]  # few rows have kernels of their own
    assert_near({"y": y}, {"y": kernels.gated_mlp(**{name: x.float() for name, x in a.items()})}, 1e-2)
    torch.testing.assert_close(few, y[:3], rtol=2e-2, atol=2e-2)


@without_a_gpu
def test_views(launched: list[str]):
    a = inputs(80, D=72, I=128, O=24)
    wide = {name: torch.cat([x.new_zeros(len(x), 3), x, x], 1)[:, 3 : 3 + x.shape[1]] for name, x in a.items()}
    expected, actual = results(a), results(wide)
    assert all(torch.equal(x, expected[name]) for name, x in actual.items())
    assert launched == ["fused_forward", "fused_backward"] * 2


@without_a_gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_autocast(recompute: bool, launched: list[str]):
    a = inputs(80, D=72, I=128, O=24, dtype=torch.float32)
    expected = results(a, backend="reference")
    with torch.autocast("cpu", torch.bfloat16), kernels.recomputing(recompute):
        actual = results(a)
    assert launched == ["fused_forward", "fused_backward"]
    assert actual["y"].dtype == torch.bfloat16
    assert all(actual[name].dtype == torch.float32 for name in MLP)
    assert_near(actual, expected, 2e-2)


@without_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_to_another_dtype(dtype: torch.dtype, launched: list[str]):
    with torch.autocast("cpu", torch.float16):
        results(inputs(80, D=72, I=128, O=24, dtype=dtype))
    assert not launched


@without_a_gpu
def test_autocast_does_not_round_fp64(launched: list[str]):
    a = inputs(80, D=72, I=128, O=24, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):  # as PyTorch's products
        results(a | {"gate_up": a["gate_up"].double()})
    assert not launched


@without_a_gpu
def test_gradients_are_not_differentiated(launched: list[str]):
    a = {name: x.requires_grad_() for name, x in inputs(80, D=72, I=128, O=24).items()}
    with kernels.backend("triton"):
        y = kernels.gated_mlp(**a).square().sum()
    (dx,) = torch.autograd.grad(y, [a["x"]], create_graph=True)
    with pytest.raises(kernels.UserError, match="cannot be differentiated again"):
        dx.sum().backward()


@pytest.mark.slow
@without_a_gpu
def test_the_op_is_registered_properly(launched: list[str]):
    arguments = [x.requires_grad_() for x in inputs(80, D=72, I=128, O=24).values()]
    for keep in (True, False):
        options = ("silu", keep, False, True, False)
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.token_mixer_zoo.gated_mlp, (*arguments, *options), test_utils=tests)


@pytest.mark.slow
@without_a_gpu
def test_compiled(launched: list[str]):
    a = {name: x.requires_grad_() for name, x in inputs(80, D=72, I=128, O=24).items()}
    with kernels.backend("triton"):
        with kernels.recomputing():  # like compiled code
            y = kernels.gated_mlp(**a)
        expected = torch.autograd.grad(y.sum(), list(a.values()))
        for dynamic in (False, True):
            compiled = torch.compile(kernels.gated_mlp, fullgraph=True, backend="aot_eager", dynamic=dynamic)
            actual = torch.autograd.grad(compiled(**a).sum(), list(a.values()))
            assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
    assert launched == ["fused_forward", "fused_backward"] * 3


def dry(*, gpu: Gpu, M: int, D: int, I: int, O: int, dtype: torch.dtype):
    """Names of the launches of a call and its backward pass, none of which runs, and the paths."""
    sizes = {"x": (M, D), "gate_up": (2 * I, D), "down": (O, I)}
    a = {name: torch.zeros(size, dtype=dtype, requires_grad=True) for name, size in sizes.items()}
    with assumed(gpu), kernels.backend("triton"), dry_run() as record:
        kernels.gated_mlp(**a).sum().backward()
    return [launch.name.removeprefix("gated_linear.") for launch in record.launches], record.paths


FUSED = ["hopper.gated_product", "hopper.gated_gradients"]
SEPARATE = ["activation_gate.op.multiply", "activation_gate.op.differentiate"]


@without_a_gpu
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, FUSED),
        ({"M": 2304}, [FUSED[0], SEPARATE[1]]),  # 36 tiles forward, 18 backward
        ({"M": 1152}, SEPARATE),  # 18 tiles
        ({"I": 320}, SEPARATE),
        ({"D": 60}, [SEPARATE[0], FUSED[1]]),
        ({"D": 1032}, [SEPARATE[0], FUSED[1]]),
        ({"O": 1028}, [FUSED[0], SEPARATE[1]]),
        ({"O": 1016}, [FUSED[0], SEPARATE[1]]),
        ({"dtype": torch.float16}, SEPARATE),
        ({"gpu": Gpu((8, 0), 4)}, SEPARATE),
        ({"gpu": Gpu((10, 0), 4)}, SEPARATE),
    ],
)
def test_when_they_are_chosen(change: dict[str, Any], expected: list[str]):
    call = {"gpu": Gpu((9, 0), 4), "M": 2305, "D": 1024, "I": 256, "O": 1024, "dtype": torch.bfloat16} | change
    names, paths = dry(**call)
    assert names == expected
    assert paths == ([select.FUSED] if set(expected) & set(FUSED) else [])


@without_a_gpu
def test_deterministic_mode_takes_them_for_any_number_of_rows():
    call = {"gpu": Gpu((9, 0), 4), "D": 1032, "I": 256, "O": 1016, "dtype": torch.bfloat16}
    with kernels.deterministic():
        names = [dry(**call, M=M)[0] for M in (1, 2305)]
        other, _ = dry(**call | {"I": 320}, M=2305)
    # then come the other products, which have fixed tiles
    assert [[name for name in each if name in (*FUSED, *SEPARATE)] for each in (*names, other)] == [
        FUSED,
        FUSED,
        SEPARATE,
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "missing"),
    [("gated_product", ()), ("gated_product", ("gate_up",)), ("gated_gradients", ()), ("gated_gradients", ("h",))],
)
def test_shared_memory(kernel: str, missing: tuple[str, ...]):
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = repr(NVMMASharedLayout(128, 16, 2))
    rows, columns = f"tensordesc<bf16[128, 64],{layout}>", f"tensordesc<bf16[64, 128],{layout}>"
    types = {"x": rows, "dy": rows, "weight": rows if kernel == "gated_product" else columns, "M": "i32"}
    fixed = {"K": 1024, "I": 2816, "SILU": True} | dict.fromkeys(missing)
    assert shared_memory(HOPPER, kernel, fixed, types, warps=4) <= MOST


# rows, D, I and O: sizes of training; a short sum and many columns; sums that are not whole steps
SIZES = [(8193, 1024, 2816, 1024), (2500, 64, 8192, 64), (20001, 136, 384, 72)]


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_on_device(
    size: tuple[int, int, int, int],
    recompute: bool,
    activation: str,
    launched: list[str],
    monkeypatch: pytest.MonkeyPatch,
):
    M, D, I, O = size
    a = inputs(M, D=D, I=I, O=O)
    expected = results({name: x.float() for name, x in a.items()}, activation, backend="reference")
    with kernels.recomputing(recompute):
        runs = [results(a, activation) for _ in range(5)]
    assert launched == ["fused_forward", "fused_backward"] * 5
    assert_near(runs[0], expected, 1e-2)
    monkeypatch.setattr(select, "runs_gluon", lambda device: False)
    runs.append(results(a, activation))  # no row may be off, which the norm of a large tensor would not show
    assert len(launched) == 10
    assert all(torch.equal(x, run[name]) for run in runs for name, x in runs[0].items())


@pytest.mark.gpu
@pytest.mark.parametrize("learned", [("x",), ("gate_up",), ("down",), ("x", "down")])
def test_frozen_weights_on_device(learned: tuple[str, ...], launched: list[str]):
    a = inputs(2, 2001, D=512, I=1280, O=264)
    expected, actual = results(a), results(a, learned=learned)
    assert launched == (["fused_forward", "fused_backward"] * 2)[: 3 if learned == ("down",) else 4]
    assert all(torch.equal(x, expected[name]) for name, x in actual.items())


@pytest.mark.gpu
def test_the_second_half_alone_on_device(launched: list[str]):
    a = inputs(4001, D=512, I=1280, O=264)
    gate_up = (a["x"] @ a["gate_up"].T).requires_grad_()
    weight = a["down"].requires_grad_()
    dy = torch.randn(4001, 264, device="cuda")
    actual = torch.autograd.grad(kernels.gated_linear(gate_up, weight), [gate_up, weight], dy.bfloat16())
    assert launched == ["fused_backward"]
    exact = [x.detach().float().requires_grad_() for x in (gate_up, weight)]
    expected = torch.autograd.grad(opened(exact[0], "silu") @ exact[1].T, exact, dy.bfloat16().float())
    assert_near({str(i): x for i, x in enumerate(actual)}, {str(i): x for i, x in enumerate(expected)}, 1e-2)


@pytest.mark.gpu
def test_unaligned_tensors_on_device(launched: list[str]):
    a = inputs(4001, D=512, I=1280, O=264)
    shifted = {name: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape) for name, x in a.items()}
    expected, actual = results(a), results(shifted)
    assert launched == ["fused_forward", "fused_backward"] * 2
    assert_near(actual, expected, 5e-3)


@pytest.mark.gpu
def test_compiled_on_device(launched: list[str]):
    a = {name: x.requires_grad_() for name, x in inputs(4001, D=512, I=1280, O=264).items()}
    compiled = torch.compile(kernels.gated_mlp, fullgraph=True)
    expected, actual = (torch.autograd.grad(f(**a).sum(), list(a.values())) for f in (kernels.gated_mlp, compiled))
    assert launched == ["fused_forward", "fused_backward"] * 2
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.gpu
def test_a_captured_launch_can_be_replayed(launched: list[str]):
    a = inputs(4001, D=512, I=1280, O=264)
    with torch.no_grad():
        kernels.gated_mlp(**a)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kernels.gated_mlp(**a)
        a["x"].neg_()
        graph.replay()
        assert torch.equal(y, kernels.gated_mlp(**a))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "identity"])
@pytest.mark.parametrize("size", [(1024, 2816, 1024), (136, 384, 72), (136, 328, 72)])
def test_few_rows_have_the_bits_of_many_in_deterministic_mode(size: tuple[int, int, int], activation: str):
    a = inputs(2500, **dict(zip("DIO", size, strict=True)))
    with torch.no_grad(), kernels.deterministic():
        many = kernels.gated_mlp(**a, activation=activation)
        for rows in (slice(7, 8), slice(100, 103), slice(1000, 1064)):
            few = kernels.gated_mlp(**a | {"x": a["x"][rows]}, activation=activation)
            assert torch.equal(few, many[rows])
