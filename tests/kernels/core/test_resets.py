"""A log decay of −inf: what comes before it changes nothing after it, in results and in gradients, on every backend."""

import importlib.util
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels
from kernels.core.resets import sums

from .. import test_selective_scan
from ..comparisons import DEVICE
from ..recurrences import inputs

# the fast way for decays per channel overflows where the slow one takes over
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
T = 130  # two chunks of the recurrences, and two tokens
RESETS: dict[str, list[int]] = {
    "first token": [0],
    "middle of a chunk": [31],
    "last token of a chunk": [63],
    "first token of a chunk": [64],
    "second token of a chunk": [65],
    "last token": [T - 1],
    "adjacent": [10, 11, 12, 63, 64, 100],
    "all": list(range(T)),
}
PACKED = [0, 0, 3, 67, 67, T]
# name → op, and how many axes its decay has, for `inputs`
OPS: dict[str, tuple[Callable, str]] = {
    "linear_head": (kernels.linear_recurrence, "head"),
    "linear_channel": (kernels.linear_recurrence, "channel"),
    "linear_constant": (kernels.linear_recurrence, "constant"),
    "delta_head": (kernels.delta_rule, "head"),
    "delta_constant": (kernels.delta_rule, "constant"),
    "scan": (kernels.selective_scan, "scan"),
}
PER_STEP = [name for name in OPS if "constant" not in name]
TRITON = pytest.param(
    "triton",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="not on every platform"),
    ],
)


def arguments(name: str, decay: str = "mild", *, length: int = T, dtype: torch.dtype, **sizes: object) -> dict:
    """Arguments of an op without a reset."""
    if name == "scan":
        return test_selective_scan.inputs(length, B=1, D=4, N=3, decay=decay, dtype=dtype, **sizes)
    small = {"B": 1, "G": 1, "K": 16, "V": 16, **sizes}
    return inputs(length, gate=OPS[name][1], decay=decay, dtype=dtype, **small)


def reset(a: dict[str, Tensor], where: str) -> None:
    """Put resets there: in all heads and channels, or at random."""
    g = a["log_decay"]
    if g.dim() == 1:
        g[: len(g) // 2 + 1] = -math.inf
    elif where == "random":
        g.masked_fill_(torch.rand(g.shape) < 0.3, -math.inf)
    else:
        g[:, RESETS[where]] = -math.inf


def run(name: str, a: dict[str, Tensor], backend: str, since: int = 0) -> dict[str, Tensor]:
    """Results and gradients of a loss of the outputs from a token on and of the final state."""
    leaves = {n: x.detach().to(DEVICE) for n, x in a.items()}
    for x in leaves.values():
        x.requires_grad_(x.is_floating_point())
    with kernels.backend(backend):
        o, state = OPS[name][0](**leaves, return_state=True)
    generator = torch.Generator().manual_seed(1)
    arriving = [torch.randn(x.shape, generator=generator).to(x) for x in (o, state)]
    loss = (o * arriving[0])[:, since:].sum() + (state * arriving[1]).sum()
    wanted = {n: x for n, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    actual = {"o": o, "state": state, **{f"gradient of {n}": g for n, g in zip(wanted, gradients, strict=True)}}
    return {n: x.detach().cpu() for n, x in actual.items()}


def close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Each result relative to its norm; where it has tokens, those of each third of a chunk by themselves."""
    for name, x in expected.items():
        y = actual[name]
        assert y.isfinite().all(), f"{name} is not finite"
        pieces = [(x, y)]
        if x.dim() > 2 and x.shape[1] == T and name != "gradient of log_decay":  # whose terms cancel
            pieces += zip(x.split(21, 1), y.split(21, 1), strict=True)
        for wanted, piece in pieces:
            error, norm = float((piece.double() - wanted.double()).norm()), float(wanted.double().norm())
            if name == "gradient of log_decay" and x.dim() == 1:  # likewise, over all tokens
                norm = max(norm, T * float(expected["state"].norm()))
            assert error <= tolerance * norm + 1e-12, f"{name}: error {error:.2g} at norm {norm:.2g}"


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("decay", ["mild", "mixed"])
@pytest.mark.parametrize("backend", ["torch", TRITON])
@pytest.mark.parametrize("where", [*RESETS, "random"])
@pytest.mark.parametrize("name", PER_STEP)
def test_against_the_loop(name: str, where: str, backend: str, decay: str):
    a = arguments(name, decay, dtype=torch.float32)
    reset(a, where)
    close(run(name, a, backend), run(name, a, "reference"))


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("backend", ["torch", TRITON])
@pytest.mark.parametrize("where", ["adjacent", "random"])
@pytest.mark.parametrize("name", PER_STEP)
def test_packed_documents(name: str, where: str, backend: str):
    a = arguments(name, dtype=torch.float32, documents=PACKED)
    reset(a, where)
    close(run(name, a, backend), run(name, a, "reference"))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [None, PACKED])
@pytest.mark.parametrize("backend", ["torch", TRITON])
@pytest.mark.parametrize("name", ["linear_constant", "delta_constant"])
def test_constants(name: str, backend: str, packed: list[int] | None):
    a = arguments(name, dtype=torch.float32, documents=packed, G=4)
    reset(a, "constant")
    actual, expected = run(name, a, backend), run(name, a, "reference")
    close(actual, expected)
    assert not actual["gradient of log_decay"][:3].any()


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("backend", ["torch", "reference", TRITON])
@pytest.mark.parametrize(
    "where", ["first token", "middle of a chunk", "last token of a chunk", "second token of a chunk"]
)
@pytest.mark.parametrize("name", PER_STEP)
def test_nothing_passes(name: str, where: str, backend: str):
    """Gradients before a reset are exactly 0, and results behind it have the same bits whatever was before."""
    a, (at,) = arguments(name, dtype=torch.float32), RESETS[where]
    reset(a, where)
    actual = run(name, a, backend, since=at)
    for n, g in actual.items():
        if n == "gradient of initial_state":
            assert not g.any(), n
        elif n.startswith("gradient") and g.dim() > 2 and g.shape[1] == T:
            own = n == "gradient of log_decay"
            # what later tokens contribute to an earlier decay only cancels in kernels of the linear recurrence, and in
            # PyTorch on a device, which would have to be waited for
            rounds = backend == "triton" or (backend == "torch" and DEVICE == "cuda")
            if own and rounds and OPS[name][0] is kernels.linear_recurrence:
                assert not at or g[:, :at].abs().max() <= 1e-6 * g.abs().max()
                assert not g[:, at].any(), n
            else:
                assert not g[:, : at + own].any(), n
            assert g[:, at + 1 :].any(), n
    other = {n: x.clone() for n, x in a.items()}
    values = other["x" if name == "scan" else "v"]
    values[:, :at] *= 1e18
    other["initial_state"] *= 1e18
    assert torch.equal(run(name, other, backend)["o"][:, at:], actual["o"][:, at:])


@pytest.mark.parametrize("backend", ["torch", "reference", TRITON])
@pytest.mark.parametrize("name", OPS)
def test_a_single_token(name: str, backend: str):
    a = arguments(name, length=1, dtype=torch.float32)
    expected_state = {**a, "initial_state": torch.zeros_like(a["initial_state"])}
    a["log_decay"].fill_(-math.inf)
    op = OPS[name][0]
    with torch.no_grad(), kernels.backend(backend):
        actual = op(**{n: x.to(DEVICE) for n, x in a.items()}, return_state=True)
    with torch.no_grad(), kernels.backend("reference"):
        expected = op(**expected_state, return_state=True)
    torch.testing.assert_close([x.cpu() for x in actual], list(expected))
    if backend != "triton" or name != "scan":
        gradients = run(name, a, backend)
        assert not gradients["gradient of log_decay"].any()
        assert all(x.isfinite().all() for x in gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "reference", TRITON])
def test_a_state_that_never_decays(backend: str):
    """A rate of 0 keeps its state whatever the decay of its channel: −inf · 0 is not a number."""
    a = arguments("scan", dtype=torch.float32)
    a["rate"][:, 0] = 0
    reset(a, "adjacent")
    actual = run("scan", a, backend)
    assert all(x.isfinite().all() for x in actual.values())
    a["log_decay"] = a["log_decay"].clamp(min=-1e4)
    expected = run("scan", a, "reference")
    close({n: actual[n] for n in ("o", "state")}, {n: expected[n] for n in ("o", "state")})


@pytest.mark.parametrize("name", [*PER_STEP, "linear_constant", "delta_constant"])
def test_positive_decays_are_refused_on_a_cpu(name: str):
    a = arguments(name, dtype=torch.float32)
    a["log_decay"].view(-1)[-1] = 0.5
    with pytest.raises(ValueError, match=r"^log_decay: must be ≤ 0, got 0\.5$"):
        OPS[name][0](**a)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 64, 100])
def test_sums_of_a_row_in_deterministic_mode_are_those_of_the_row_alone(length: int):
    x = torch.randn(33, length, 2, device=DEVICE, dtype=torch.float64)
    with kernels.deterministic():
        together, alone = sums(x, 1, torch.float64), sums(x[:1], 1, torch.float64)
    torch.testing.assert_close(together, x.cumsum(1))
    assert torch.equal(together[:1], alone)
