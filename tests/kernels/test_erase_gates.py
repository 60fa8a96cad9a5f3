"""Keys, erase keys and decays of RWKV-7: by the formulas, and in Triton."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import erase_gates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")
NAMES = ("keys", "erase", "write", "log_decay")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that reading unwritten memory shows."""
    module = pytest.importorskip("kernels.erase_gates.gpu.op")
    allocate = module.new
    monkeypatch.setattr(module, "new", lambda *sizes, **options: allocate(*sizes, **options).fill_(torch.nan))


def inputs(*shape: int) -> dict[str, Tensor]:
    """Keys of this shape, gates that are columns of a projection, some of them extreme, and parameters."""
    *outer, M, K = shape
    wide = 3 * torch.randn(*outer, 2 * M * K + 3)
    wide[..., 0], wide[..., -1] = 100.0, -100.0  # exponentials would overflow
    tensors = {"k": torch.randn(shape), "decay": wide[..., : M * K], "rate": wide[..., -M * K :]}
    tensors |= {name: torch.randn(M * K) for name in ("decay_bias", "rate_bias", "k_k", "k_a")}
    return {name: x.to(DEVICE) for name, x in tensors.items()}


def results(tensors: dict[str, Tensor], backend: str, through: tuple[str, ...] = NAMES) -> dict[str, Tensor]:
    """All results, and the gradients through some of them."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    with kernels.backend(backend):
        outputs = dict(zip(NAMES, erase_gates(**leaves, largest=0.6), strict=True))
    generator = torch.Generator().manual_seed(0)
    arriving = [torch.randn(x.shape, generator=generator).to(x) for x in outputs.values()]
    wanted = [(x, g) for (name, x), g in zip(outputs.items(), arriving, strict=True) if name in through]
    reached, their_gradients = zip(*wanted, strict=True)
    gradients = torch.autograd.grad(reached, list(leaves.values()), their_gradients, materialize_grads=True)
    named = {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}
    return {**{name: x.detach() for name, x in outputs.items()}, **named}


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_by_the_formulas(backend: str):
    a = {name: x.double() for name, x in inputs(2, 5, 3, 4).items()}
    with kernels.backend(backend):
        keys, erase, write, log_decay = erase_gates(**a, largest=0.6)
    rate = torch.sigmoid(a["rate"] + a["rate_bias"]).unflatten(-1, (3, 4))
    direction = F.normalize(a["k"] * a["k_k"].view(3, 4), dim=-1)
    torch.testing.assert_close(erase, direction)
    torch.testing.assert_close(write, rate * direction)
    torch.testing.assert_close(keys, a["k"] * (1 + (rate - 1) * a["k_a"].view(3, 4)))
    decay = torch.sigmoid(a["decay"] + a["decay_bias"])
    torch.testing.assert_close(log_decay, -0.6 * decay.unflatten(-1, (3, 4)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 3, 5), (2, 70, 2, 64)])
def test_outputs_and_gradients(shape: tuple[int, ...], backend: str):
    tensors = inputs(*shape)
    torch.testing.assert_close(results(tensors, backend), results(tensors, "reference"), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("through", NAMES)
def test_gradients_through_one_result(through: str, backend: str):
    tensors = inputs(2, 3, 2, 5)
    one, other = (results(tensors, name, (through,)) for name in (backend, "reference"))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_is_rounded_once(backend: str):
    tensors = inputs(2, 9, 2, 33)
    tensors |= {name: tensors[name].bfloat16() for name in ("k", "decay", "rate")}
    exact = results({name: x.float() for name, x in tensors.items()}, "reference")
    rounded = results(tensors, backend)
    low = {"keys", "erase", "write", "dk", "ddecay", "drate"}
    assert {name for name, x in rounded.items() if x.dtype == torch.bfloat16} == low
    for name, x in rounded.items():
        torch.testing.assert_close(x.float(), exact[name], rtol=2e-2, atol=1e-1 if name[0] == "d" else 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_of_zeros_erase_nothing(backend: str):
    tensors = inputs(3, 2, 4)
    tensors["k"] = torch.zeros_like(tensors["k"])
    one = results(tensors, backend)
    assert not one["erase"].any()
    assert all(x.isfinite().all() for x in one.values())
    torch.testing.assert_close(one, results(tensors, "reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_repeat_to_the_bit(backend: str):
    tensors = inputs(2, 70, 2, 8)
    first, second = results(tensors, backend), results(tensors, backend)
    assert all(torch.equal(first[name], x) for name, x in second.items())


@pytest.mark.slow
def test_the_op_is_registered_properly(monkeypatch: pytest.MonkeyPatch):
    tensors = inputs(2, 3, 2, 4)
    results(tensors, "triton")
    monkeypatch.undo()
    args = [x.clone().requires_grad_() for x in tensors.values()]
    torch.library.opcheck(torch.ops.token_mixer_zoo.erase_gates, (*args, 0.6, False))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("k", (6,), r"k: expected \[…,M,K\], got shape \(6,\)"),
        ("rate", (2, 5), r"rate: expected \[2, 6\], got shape \(2, 5\)"),
        ("k_a", (2, 3), r"k_a: expected \[6\], got shape \(2, 3\)"),
    ],
)
def test_arguments_that_do_not_fit(name: str, shape: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=f"^{message}"):
        erase_gates(**inputs(2, 2, 3) | {name: torch.zeros(shape)})


def test_integer_keys_and_bounds_below_0():
    tensors = inputs(2, 2, 3)
    with pytest.raises(ValueError, match=r"^k: expected a floating dtype, got torch.int64"):
        erase_gates(**tensors | {"k": tensors["k"].long()})
    for largest in (-0.6, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^largest: must be a finite number from 0, got {largest}"):
            erase_gates(**tensors, largest=largest)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_device(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        sys.modules["kernels.erase_gates"].OP, "limits", None
    )  # they are not used on a GPU before this has passed
    tensors = inputs(2, 4097, 16, 64)
    tensors |= {name: tensors[name].to(dtype) for name in ("k", "decay", "rate")}
    first, second = results(tensors, "triton"), results(tensors, "triton")
    exact = results({name: x.double() for name, x in tensors.items()}, "torch")
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    for name, x in first.items():
        assert torch.equal(second[name], x), name
        assert (x - exact[name]).norm() <= tolerance * exact[name].norm(), name
