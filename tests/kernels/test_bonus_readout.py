"""The readout of RWKV-7: by the formula, and in Triton."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import bonus_readout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that reading unwritten memory shows."""
    module = pytest.importorskip("kernels.bonus_readout.gpu.op")
    allocate = module.new
    monkeypatch.setattr(module, "new", lambda *sizes, **options: allocate(*sizes, **options).fill_(torch.nan))


def inputs(B: int, T: int, H: int, E: int, K: int, V: int) -> dict[str, Tensor]:
    """Values that are columns of a projection, and other tensors without gaps."""
    tensors = {"o": 3 * torch.randn(B, T, H, V) + 1, "q": torch.randn(B, T, H * E, K)}
    tensors |= {"k": torch.randn(B, T, H * E, K), "v": torch.randn(B, T, H * V + 3)[..., 2:-1].unflatten(-1, (H, V))}
    tensors |= {"gate": torch.rand(B, T, H * V), "r_k": torch.randn(H * E * K)}
    tensors |= {"weight": torch.randn(H, V), "bias": torch.randn(H, V)}
    return {name: x.to(DEVICE) for name, x in tensors.items()}


def results(tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """y and all gradients."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    with kernels.backend(backend):
        y = bonus_readout(**leaves, eps=1e-3)
    arriving = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y)
    gradients = torch.autograd.grad(y, list(leaves.values()), arriving)
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_the_formula(backend: str):
    a = {name: x.double() for name, x in inputs(2, 3, 2, 2, 4, 5).items()}
    norm = F.group_norm(a["o"].flatten(0, 1).flatten(1), 2, a["weight"].flatten(), a["bias"].flatten(), 1e-3)
    own = (a["q"] * a["k"] * a["r_k"].view(4, 4)).sum(-1).view(2, 3, 2, 2).sum(-1, keepdim=True) * a["v"]
    with kernels.backend(backend):
        y = bonus_readout(**a, eps=1e-3)
    torch.testing.assert_close(y, (norm.view(2, 3, 10) + own.flatten(2)) * a["gate"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1, 1), (2, 5, 2, 1, 8, 8), (1, 7, 3, 2, 5, 11), (2, 70, 2, 1, 64, 64)])
def test_outputs_and_gradients(sizes: tuple[int, ...], backend: str):
    tensors = inputs(*sizes)
    torch.testing.assert_close(results(tensors, backend), results(tensors, "reference"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_rounded_once(backend: str):
    tensors = inputs(2, 9, 2, 1, 33, 16)
    low = {"o", "q", "k", "v", "gate"}
    tensors |= {name: tensors[name].bfloat16() for name in low}
    exact = results({name: x.float() for name, x in tensors.items()}, "reference")
    rounded = results(tensors, backend)
    assert {name for name, x in rounded.items() if x.dtype == torch.bfloat16} == low | {"y"}
    for name, x in rounded.items():
        assert (x - exact[name]).norm() <= 1e-2 * exact[name].norm(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_repeat_to_the_bit(backend: str):
    tensors = inputs(2, 70, 2, 1, 8, 8)
    first, second = results(tensors, backend), results(tensors, backend)
    assert all(torch.equal(first[name], x) for name, x in second.items())


@pytest.mark.slow
def test_the_op_is_registered_properly(monkeypatch: pytest.MonkeyPatch):
    tensors = inputs(2, 3, 2, 2, 4, 4)
    results(tensors, "triton")
    monkeypatch.undo()
    args = [x.clone().requires_grad_() for x in tensors.values()]
    torch.library.opcheck(torch.ops.token_mixer_zoo.bonus_readout, (*args, 1e-3, False))


def test_heads_that_the_kernels_cannot_hold():
    tensors = inputs(1, 1, 1, 1, 4097, 1)
    with (
        kernels.backend("triton"),
        pytest.raises(kernels.UserError, match="which takes heads of at most 4096 channels"),
    ):
        bonus_readout(**tensors)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (1, 2, 3, 4), r"q: expected \[…,H·E,K\] for o \[…,H,V\] of \(1, 2, 2, 4\), got shape \(1, 2, 3, 4\)"),
        ("k", (1, 2, 2, 5), r"k: expected \[1, 2, 2, 4\], got shape \(1, 2, 2, 5\)"),
        ("gate", (1, 2, 2, 4), r"gate: expected \[1, 2, 8\], got shape \(1, 2, 2, 4\)"),
        ("bias", (8,), r"bias: expected \[2, 4\], got shape \(8,\)"),
    ],
)
def test_arguments_that_do_not_fit(name: str, shape: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        bonus_readout(**inputs(1, 2, 2, 1, 4, 4) | {name: torch.zeros(shape)})


@pytest.mark.parametrize("o", [torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 2, 4, dtype=torch.int64)])
def test_outputs_without_heads_or_in_integers(o: Tensor):
    with pytest.raises(ValueError, match=r"^o: expected a floating \[…,H,V\] with at least one head, got torch"):
        bonus_readout(**inputs(1, 2, 2, 1, 4, 4) | {"o": o})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_device(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        sys.modules["kernels.bonus_readout"].OP, "limits", None
    )  # they are not used on a GPU before this has passed
    tensors = inputs(2, 4097, 16, 1, 64, 64)
    tensors |= {name: tensors[name].to(dtype) for name in ("o", "q", "k", "v", "gate")}
    first, second = results(tensors, "triton"), results(tensors, "triton")
    exact = results({name: x.double() for name, x in tensors.items()}, "torch")
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    for name, x in first.items():
        assert torch.equal(second[name], x), name
        assert (x - exact[name]).norm() <= tolerance * exact[name].norm(), name
