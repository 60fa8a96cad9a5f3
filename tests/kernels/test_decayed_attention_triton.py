"""Attention with log decays in Triton: small cases in the interpreter, real sizes on a device."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import kernels
from kernels.core import static_documents as static
from kernels.core.documents import documents
from kernels.window_attention import CANDIDATES

from .comparisons import DEVICE, interpreted

pytest.importorskip("triton")
from kernels.gpu.device import GPUS, HOPPER, OTHER
from kernels.gpu.launch_table import TABLE, LaunchConfig
from kernels.gpu.listing import listed
from kernels.window_attention.arguments import check
from kernels.window_attention.gpu import op

pytestmark = pytest.mark.usefixtures("poison")

PACKED = [0, 0, 5, 70, 70, 135, 150, 150]
Tensors = dict[str, Tensor]


def inputs(
    T: int,
    *,
    B: int = 1,
    H: int = 2,
    Hkv: int = 1,
    D: int = 16,
    V: int | None = None,
    slope: float = 3.0,
    resets: float = 0.0,
    dtype: torch.dtype = torch.float16,
) -> Tensors:
    """Queries, keys and values in half precision, and log decays in fp32 of gates with this slope."""
    sizes = {"q": (H, D), "k": (Hkv, D), "v": (Hkv, V or D)}
    a = {name: torch.randn(B, T, *size, device=DEVICE).to(dtype) for name, size in sizes.items()}
    log_decay = logsigmoid(slope * torch.randn(B, T, H, device=DEVICE) + 2)
    return a | {"log_decay": log_decay.masked_fill(torch.rand_like(log_decay) < resets, -math.inf)}


def results(name: str, a: Tensors, arriving: Tensor | None = None, **options: Any) -> Tensors:
    """The output of a candidate or of the reference, and the gradients of all inputs."""
    leaves = {key: x.detach().requires_grad_() for key, x in a.items()}
    arguments = {"window_size": None, "first_key": None, "scale": None, "cu_seqlens": None, **options}
    if name == "reference":
        with kernels.backend("reference"):
            o = kernels.window_attention(**leaves, **arguments)
    else:
        o = CANDIDATES[name].forward(check(**leaves, **arguments))
    if arriving is None:
        arriving = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(o, [*leaves.values()], arriving.to(o))
    return {"o": o.detach(), **{f"d{key}": x for key, x in zip(leaves, gradients, strict=True)}}


def assert_right(a: Tensors, name: str | None = None, tolerance: float = 1e-3, **options: Any) -> Tensors:
    """Compare with exact results for the same rounded inputs."""
    actual = results("triton", a, **options)
    name = name or ("reference" if a["q"].shape[1] <= 200 else "chunk")  # the loop takes long
    exact = results(name, {key: x.float() for key, x in a.items()}, **options)
    for key, expected in exact.items():
        assert actual[key].isfinite().all(), key
        assert (actual[key].float() - expected).norm() <= tolerance * (expected.norm() + 1e-2), key
    return actual


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        *(({"T": T}, {"window_size": window}) for T in (1, 63, 129) for window in (None, 1, 50)),
        ({"T": 300, "B": 2}, {}),
        ({"T": 300}, {"window_size": 130}),
        ({"T": 150}, {"cu_seqlens": PACKED}),
        ({"T": 150, "resets": 0.05}, {"cu_seqlens": PACKED, "window_size": 20}),
        ({"T": 200, "H": 4, "Hkv": 2, "D": 32, "V": 16}, {"scale": 0.3}),
        ({"T": 200, "dtype": torch.bfloat16}, {}),
        ({"T": 300, "resets": 0.02}, {}),
        ({"T": 300, "slope": 1000.0}, {}),  # decays of thousands
        ({"T": 1100, "H": 1}, {}),  # sums of several steps along time
    ],
    ids=str,
)
def test_against_the_loop(sizes: dict[str, Any], options: dict[str, Any]):
    options = {key: torch.tensor(x) if key == "cu_seqlens" else x for key, x in options.items()}
    assert_right(inputs(**sizes), tolerance=6e-3 if "dtype" in sizes else 1e-3, **options)


@interpreted
@pytest.mark.slow
def test_gentle_decays_after_a_sum_of_millions():
    a = inputs(1300, H=1)
    a["log_decay"][:, :1240] = -9_999  # 2^24 in log2 after 1,164 tokens
    actual, exact = results("triton", a), results("chunk", {key: x.double() for key, x in a.items()})
    for key, expected in exact.items():
        assert (actual[key].double() - expected).norm() <= 1e-3 * expected.norm(), key


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("architecture", [HOPPER, OTHER])
def test_every_launch(architecture: int, size: int, monkeypatch: pytest.MonkeyPatch):
    """All entries of the table, with masked and unmasked blocks."""

    def launch(kernel: str, *_: Any) -> LaunchConfig:
        entry = TABLE[kernel][architecture, size, 2]
        outer, inner = (entry.keys, entry.block) if kernel.endswith("key_gradients") else (entry.block, entry.keys)
        assert outer % inner == 0  # blocks on the diagonal
        return entry

    monkeypatch.setattr(op, "launch", launch)
    assert_right(inputs(290, H=1, D=size, resets=0.005))


def test_strided_streams_and_gradients():
    """Heads of one projection, and a gradient that is not contiguous."""
    stream = torch.randn(1, 70, 7 * 16, device=DEVICE).half().unflatten(2, (7, 16))
    a = {"q": stream[:, :, :4], "k": stream[:, :, 4:5], "v": stream[:, :, 6:], "log_decay": -torch.rand(1, 70, 4)}
    a["log_decay"] = a["log_decay"].to(DEVICE)
    arriving = torch.randn(1, 70, 16, 4, device=DEVICE).half().mT
    expected = results("triton", {key: x.contiguous() for key, x in a.items()}, arriving.contiguous())
    for key, x in results("triton", a, arriving).items():
        assert torch.equal(x, expected[key]), key


@interpreted
@pytest.mark.slow
def test_later_tokens_change_no_bit():
    a = inputs(200)
    o = results("triton", a)["o"]
    for n in (1, 64, 130):
        assert torch.equal(results("triton", {key: x[:, :n] for key, x in a.items()})["o"], o[:, :n])
    changed = {key: x.clone() for key, x in a.items()}
    changed["log_decay"][:, 130:] *= 1000
    changed["v"][:, 130:] *= 100
    assert torch.equal(results("triton", changed)["o"][:, :130], o[:, :130])


@interpreted
def test_nothing_passes_a_reset():
    """Gradients before it are exactly 0, and outputs behind it have the same bits whatever was before."""
    a = inputs(150)
    a["log_decay"][:, 40] = -math.inf
    other = a | {"k": a["k"].clone(), "v": a["v"].clone()}
    other["k"][:, :40] *= 100
    other["v"][:, :40] *= 1000
    arriving = torch.randn(a["q"].shape)
    arriving[:, :40] = 0
    actual = results("triton", a, arriving)
    assert torch.equal(results("triton", other, arriving)["o"][:, 40:], actual["o"][:, 40:])
    for name in ("k", "v", "log_decay"):
        assert not actual[f"d{name}"][:, : 40 + (name == "log_decay")].any(), name
        assert actual[f"d{name}"][:, 41:].any(), name


@interpreted
def test_first_tokens_of_documents_have_no_gradient():
    gradient = assert_right(inputs(150), cu_seqlens=torch.tensor(PACKED))["dlog_decay"]
    assert not gradient[:, [0, 5, 70, 135]].any()
    assert gradient[:, 1:5].any()


@interpreted
@pytest.mark.slow
def test_static_documents_are_not_read_on_the_host(monkeypatch: pytest.MonkeyPatch):
    """A captured graph fills its tables again. Its results have the bits of a call with the documents."""
    a, arriving = inputs(150), torch.randn(1, 150, 2, 16)
    there = static.static_copy(torch.tensor([0, 20, 70, 71, 150], dtype=torch.int32), 150)
    results("triton", a, arriving, cu_seqlens=there)
    bounds = torch.tensor([0, 64, 149, 150], dtype=torch.int32)
    static.static_documents(there, 150).fill(documents(bounds, 150))
    expected = results("triton", a, arriving, cu_seqlens=bounds)
    monkeypatch.setattr(static, "capturing", lambda device: True)
    for key, x in results("triton", a, arriving, cu_seqlens=there).items():
        assert torch.equal(x, expected[key]), key


@interpreted
@pytest.mark.slow
def test_it_compiles_as_one_graph():
    a = inputs(40)
    leaves = {key: x.requires_grad_() for key, x in a.items()}

    def run(**leaves: Tensor) -> Tensor:
        return op.forward(check(**leaves, window_size=None, first_key=None, scale=None, cu_seqlens=None))

    torch._dynamo.reset()
    outputs = [run(**leaves), torch.compile(run, fullgraph=True, backend="aot_eager")(**leaves)]
    gradients = [torch.autograd.grad(o.float().square().sum(), [*leaves.values()]) for o in outputs]
    assert torch.equal(*outputs)
    assert all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_its_launches_are_listed():
    """A dry run, as `explain` makes one, lists the launches and runs none."""
    shapes = {"q": (8, 64), "k": (8, 64), "v": (8, 64), "log_decay": (8,)}
    a = {name: torch.empty(2, 4096, *shape, device="meta", requires_grad=True) for name, shape in shapes.items()}
    a |= {name: a[name].detach().bfloat16().requires_grad_() for name in "qkv"}
    passes = listed(lambda: kernels.window_attention(**a), GPUS["H100"])
    names = [[spec.name for spec in record.launches] for record in passes]
    assert names[0] == ["window_attention.decays.sum_decays", "window_attention.kernels.by_queries"]
    assert names[1][:2] == ["window_attention.kernels.by_queries", "window_attention.kernels.by_keys"]
    assert names[1][2:] == ["window_attention.decays.differentiate_decays"]


# On a device: against fp32 in PyTorch.


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 64, 128, 256])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"T": 3001}, {}),
        ({"T": 3001, "resets": 0.003}, {"window_size": 777}),
        ({"T": 3001, "H": 8, "Hkv": 2}, {"cu_seqlens": [0, 1, 130, 1000, 1000, 3001]}),
        ({"T": 1024, "B": 4, "slope": 1000.0}, {}),
    ],
    ids=str,
)
def test_on_device(sizes: dict[str, Any], options: dict[str, Any], size: int):
    a = inputs(**sizes, D=size, dtype=torch.bfloat16)
    options = {key: torch.tensor(x, device="cuda") if key == "cu_seqlens" else x for key, x in options.items()}
    actual = assert_right(a, "chunk", 1e-2, **options)
    for key, x in results("triton", a, **options).items():
        assert torch.equal(x, actual[key]), key


@pytest.mark.gpu
def test_on_device_in_a_graph():
    a = {key: x.requires_grad_() for key, x in inputs(1000, dtype=torch.bfloat16).items()}
    there = static.static_copy(torch.tensor([0, 300, 1000], dtype=torch.int32, device="cuda"), 1000)

    def step() -> list[Tensor]:
        o = kernels.window_attention(**a, cu_seqlens=there)
        return [o, *torch.autograd.grad(o.float().square().sum(), [*a.values()])]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    bounds = torch.tensor([0, 64, 1000], dtype=torch.int32, device="cuda")
    static.static_documents(there, 1000).fill(documents(bounds, 1000))
    graph.replay()
    for x, y in zip(captured, step(), strict=True):
        assert torch.equal(x, y)
