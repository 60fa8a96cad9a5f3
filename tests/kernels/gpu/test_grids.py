"""However many states there are, no launch exceeds the limits of a grid: 2³¹ − 1 along x, 65,535 along y and z."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

import kernels

from ..comparisons import interpreted

pytest.importorskip("triton")
from kernels.delta_rule.gpu import plan as delta_plan
from kernels.gpu import plan
from kernels.gpu.launch import MOST_PROGRAMS, LaunchSpec, enqueue
from kernels.linear_recurrence.gpu import plan as linear_plan
from kernels.precondition import precondition

LIMITS = 2**31 - 1, 65_535, 65_535
RECURRENCES = [
    *((kernels.linear_recurrence, gate) for gate in ("none", "constant", "head", "channel")),
    *((kernels.delta_rule, gate) for gate in ("none", "constant", "head")),
]
MANY = [(65_536, 1), (1, 65_536), (512, 256)]  # rows and heads


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """The name and the grid of every launch, none of which runs."""
    from triton.runtime.interpreter import GridExecutor

    actual: list[tuple[str, tuple[int, ...]]] = []
    monkeypatch.setattr(
        GridExecutor, "__call__", lambda self, *arguments, **named: actual.append((self.fn.__name__, self.grid))
    )
    plan.of_rows.cache_clear()
    yield actual
    plan.of_rows.cache_clear()
    assert actual
    for name, grid in actual:
        assert all(0 < size <= most for size, most in zip(grid, LIMITS, strict=False)), f"{name}: {grid}"


def made(*shape: int, learned: bool = True, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, device=device, requires_grad=learned)


def derive(results: Any) -> None:
    """Launch the backward pass as well."""
    tensors = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]
    torch.autograd.backward([x for x in tensors if x.requires_grad], [torch.empty_like(x) for x in tensors])


def recurrence(op: Callable, gate: str, T: int, B: int, H: int, beta: bool = True) -> None:
    learned, K = T > 1, 16
    # scores of all chunks would take 16 GB, whereas single steps are ops that run nothing on this device
    of = partial(made, learned=learned, device="meta" if T > 1 else "cpu")
    decays = {"constant": (H,), "head": (B, T, H), "channel": (B, T, H, K)}
    a: dict[str, Any] = {**{name: of(B, T, H, K) for name in "qkv"}, "initial_state": of(B, H, K, K)}
    if gate != "none":
        a["log_decay"] = of(*decays[gate])
    if beta or op is kernels.delta_rule:
        a["beta"] = of(B, T, H)
    results = op(**a, return_state=True, consume_state=True)
    if learned:
        derive(results)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize(("B", "H"), MANY)
@pytest.mark.parametrize("T", [1, 65])
@pytest.mark.parametrize(("op", "gate"), RECURRENCES)
def test_recurrences(op: Callable, gate: str, T: int, B: int, H: int, grids: list):
    with kernels.backend("triton"), torch.set_grad_enabled(T > 1):
        recurrence(op, gate, T, B, H)


@interpreted
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_recurrences_in_segments(gate: str, grids: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear_plan, "BLOCK", 64)
    monkeypatch.setattr(linear_plan, "filling", lambda *arguments: 1 << 30)
    with kernels.backend("triton"):
        for B, H in MANY:
            recurrence(kernels.linear_recurrence, gate, 130, B, H, beta=False)
    assert "scan" in dict(grids)


@interpreted
def test_the_delta_rule_in_segments(grids: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(delta_plan, "segments", lambda *arguments: 2)
    with kernels.backend("triton"):
        for B, H in MANY:
            recurrence(kernels.delta_rule, "head", 130, B, H)
    assert "combine" in dict(grids)


OTHERS: dict[str, Callable[[int, int], object]] = {
    "selective_scan": lambda B, H: kernels.selective_scan(made(B, 65, 4 * H), made(B, 65, 4 * H), made(4 * H, 3)),
    "one step of selective_scan": lambda B, H: kernels.selective_scan(made(B, 1, 4 * H), made(B, 1, 4 * H)),
    "features": lambda B, H: kernels.features(
        made(B, 3, H, 16), made(16 * H, 1, 4), activation="silu", norm="l2", history=made(B, 3, 16 * H, learned=False)
    )[0],
    "short_conv": lambda B, H: kernels.short_conv(made(B, 1, 16 * H), made(16 * H, 1, 4))[0],
    "rms_norm": lambda B, H: kernels.rms_norm(made(B, 2, H, 16), made(16)),
    "gated_rms_norm": lambda B, H: kernels.gated_rms_norm(made(B, 2, H, 16), made(B, 2, H, 16), made(16)),
    "add_rms_norm": lambda B, H: kernels.add_rms_norm(made(B, 2, 16 * H), made(B, 2, 16 * H), made(16 * H)),
    "gated_linear": lambda B, H: kernels.gated_linear(made(B, 2, 32), made(16, 16)),
    "discretise": lambda B, H: kernels.discretise(made(B, 2, H), made(H), made(H)),
    "forget_gate": lambda B, H: kernels.forget_gate(made(B, 2, 16 * H)),
    "precondition": lambda B, H: precondition(made(B, 2, H, 16), made(B, 2, H, 16), made(B, 2, H), made(H), limit=1.5),
    "low_rank_forget_gate": lambda B, H: kernels.low_rank_forget_gate(made(B, 2, 16), made(16 * H, 16), made(16 * H)),
}


@interpreted
@pytest.mark.parametrize(("B", "H"), [(65_536, 1), (1, 512)])
@pytest.mark.parametrize("name", OTHERS)
def test_other_ops(name: str, B: int, H: int, grids: list):
    with kernels.backend("triton"):
        derive(OTHERS[name](B, H))


def test_all_launches_have_one_axis():
    """Others would need a limit each; `enqueue` checks the one that there is."""
    root = Path(kernels.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(program_id|num_programs)\((axis=)?[12]\)", text), f"{path}: a second axis"
        assert path.name == "launch.py" or not re.search(r"\w\[\(?\w*grid|\.run\(", text), (
            f"{path}: a launch of its own"
        )


def kernel_of_an_op() -> Any:
    from kernels.linear_recurrence.gpu.step import advance

    return advance


@pytest.mark.parametrize("launch", [enqueue, LaunchSpec])
def test_more_programs_than_a_device_can_start(launch: Callable):
    message = r"^linear_recurrence: its kernel 'advance' would need 2,147,483,648 programs, .* 2,147,483,647 .* batch"
    with pytest.raises(kernels.UserError, match=message):
        launch(kernel_of_an_op(), MOST_PROGRAMS + 1, torch.zeros(1))


def step(op: Callable, gate: str, states: int) -> None:
    """One token of many rows of two heads, against PyTorch."""
    B, H, K, V = states // 2, 2, 16, 16
    q, k, v = torch.randn(3, B, 1, H, K, device="cuda", dtype=torch.bfloat16).unbind()
    a: dict[str, Any] = {"q": q, "k": normalize(k, dim=-1), "v": v, "beta": torch.rand(B, 1, H, device="cuda")}
    shape = {"none": None, "constant": (H,), "head": (B, 1, H), "channel": (B, 1, H, K)}[gate]
    if shape is not None:
        a["log_decay"] = -torch.rand(shape, device="cuda")
    a["initial_state"] = torch.randn(B, H, K, V, device="cuda")
    run = partial(op, return_state=True)
    with torch.no_grad():
        with kernels.backend("torch"):
            expected = run(**{name: x.float() for name, x in a.items()})
        with kernels.backend("triton"):
            actual = run(**a), run(**{**a, "initial_state": a["initial_state"].clone()}, consume_state=True)
    for o, state in actual:
        torch.testing.assert_close(o.float(), expected[0], atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(state, expected[1], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("states", [65_536, 131_072])
@pytest.mark.parametrize(("op", "gate"), RECURRENCES)
def test_a_step_of_many_states(op: Callable, gate: str, states: int):
    step(op, gate, states)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65_536, 131_072])
def test_a_step_of_many_rows(rows: int):
    """The other kernels of a step of decoding, against PyTorch."""
    x, weight = torch.randn(rows, 1, 32, device="cuda"), torch.randn(32, 1, 4, device="cuda")
    decay, rate = -torch.rand(rows, 1, 32, device="cuda"), torch.rand(32, 3, device="cuda")
    steps: list[Callable[[], tuple]] = [
        lambda: kernels.selective_scan(x, decay, rate, return_state=True),
        lambda: kernels.short_conv(x, weight, history=torch.ones(rows, 3, 32, device="cuda"), return_history=True),
        lambda: (kernels.rms_norm(x.view(rows, 1, 2, 16), weight[:16, 0, 0]),),
    ]
    with torch.no_grad():
        for one in steps:
            actual = []
            for backend in ("triton", "torch"):
                with kernels.backend(backend):
                    actual.append(one())
            torch.testing.assert_close(*actual, atol=1e-4, rtol=1e-4)
