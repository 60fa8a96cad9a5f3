"""A token of Mamba-3 in one launch, next to the ops that it fuses."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import kernels
from kernels.trapezoid_token import Carried, Columns, Weights, trapezoid_token

from .places import PLACES
from .test_recurrence_token import assert_close

pytest.importorskip("triton")
from kernels.gpu.paths import dry_run

pytestmark = pytest.mark.usefixtures("poison")


class Case(NamedTuple):
    B: int = 2
    H: int = 4
    G: int = 2
    K: int = 8
    V: int = 16
    P: int = 2
    gated: bool = True
    gain: float = 1.0  # of the gates
    dtype: torch.dtype = torch.float32


CASES = [
    Case(),
    Case(B=5, H=1, G=1, K=2, V=1, P=1),
    Case(B=3, H=3, G=1, K=12, V=20, P=6, gated=False),
    Case(B=1, K=64, V=128, P=16),
    Case(G=4, K=12, P=3, gain=50.0),
    Case(dtype=torch.bfloat16, K=32, P=8),
]
ON_DEVICE = [
    Case(B=1, H=32, G=1, K=128, V=64, P=32, dtype=torch.bfloat16),
    Case(B=64, H=32, G=1, K=128, V=64, P=32, dtype=torch.bfloat16),
    Case(B=3, H=6, G=3, K=96, V=96, P=20, gated=False),
]


def arguments(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Arguments whose token is made of columns of one projection."""
    B, H, G, K, V, P, gated, gain, dtype = case
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    widths = [G * K, G * K, H * V, H, H, H, P, H * V]
    q, k, v, *gates, angles, z = draw(B, 1, sum(widths) + 3, dtype=dtype)[..., : sum(widths)].split(widths, -1)
    streams = [x.unflatten(-1, (heads, -1)) for x, heads in ((q, G), (k, G), (v, H), (z, H))]
    columns = Columns(*streams[:3], *(gain * x for x in gates), gain * angles, streams[3] if gated else None)
    weights = Weights(*(draw(*shape) for shape in ((K,), (K,), (H, K), (H, K), (H,), (H,))))
    before = torch.rand(B, H, P, generator=generator, dtype=torch.float64).to(device)
    carried = Carried(before, draw(B, G, K), draw(B, H, V), draw(B, H).abs())
    return {"columns": columns, "weights": weights, "carried": carried, "state": draw(B, H, K, V), "eps": 1e-5}


@torch.no_grad()
def run(a: dict[str, Any], backend: str, **options: Any) -> tuple[Tensor, ...]:
    with kernels.backend(backend):
        y, carried, state = trapezoid_token(**a, **options)
    return y, *carried, state


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_the_ops(case: Case, device: str):
    expected = run(arguments(case, device), "reference")
    with kernels.implementations() as ran:
        actual = run(arguments(case, device), "triton", consume_state=True)
    assert ran == {"trapezoid_token": {"triton"}}
    assert_close(actual, expected, 2e-2 if case.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("device", PLACES)
def test_states_are_overwritten_only_if_they_may_be(device: str, backend: str):
    a = arguments(Case(), device)
    memories = [*a["carried"], a["state"]]
    before = [x.clone() for x in memories]
    first = run(a, backend)
    assert all(map(torch.equal, memories, before))
    second = run(a, backend, consume_state=True)
    assert_close(second, first, 0)
    assert second[-1].data_ptr() == a["state"].data_ptr()
    # heads of a group read the key of the previous token, so that none may overwrite it
    assert torch.equal(a["carried"].k, before[1])
    in_place = [x.data_ptr() == y.data_ptr() for x, y in zip(second[1:-1], a["carried"], strict=True)]
    assert in_place == [backend == "triton", False, *[backend == "triton"] * 2]


@pytest.mark.parametrize("why", ["a gradient", "another dtype", "a long key", "deterministic"])
def test_other_calls_run_the_ops(why: str):
    a = arguments(Case(B=1, H=1, G=1, K=130, V=256) if why == "a long key" else Case())
    if why == "another dtype":
        a["columns"] = a["columns"]._replace(r=a["columns"].r.bfloat16())
    a["weights"].D.requires_grad_(why == "a gradient")
    with dry_run() as record, kernels.backend("triton"), kernels.deterministic(why == "deterministic"):
        trapezoid_token(**a)
    assert "trapezoid_token.op.advance_token" not in [launch.name for launch in record.launches]


@pytest.mark.parametrize(
    ("argument", "change", "said"),
    [
        (
            "columns",
            {"angles": torch.zeros(2, 1, 5)},
            "columns: expected a token, H a multiple of G, and 2·P ≤ K",
        ),
        ("columns", {"r": torch.zeros(2, 1, 3)}, r"r: expected \[2, 1, 4\], got shape \(2, 1, 3\)"),
        ("weights", {"q_bias": torch.zeros(4, 7)}, r"q_bias: expected \[4, 8\], got shape \(4, 7\)"),
        ("carried", {"angles": torch.zeros(1, 4, 2)}, r"angles: expected \[2, 4, 2\], got shape \(1, 4, 2\)"),
        ("state", torch.zeros(2, 4, 8, 15), r"state: expected \[2, 4, 8, 16\], got shape"),
    ],
)
def test_misfits(argument: str, change: Any, said: str):
    a = arguments(Case())
    changed = a[argument]._replace(**change) if isinstance(change, dict) else change
    with pytest.raises(ValueError, match=f"^{said}"):
        trapezoid_token(**(a | {argument: changed}))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_DEVICE)
def test_on_device(case: Case):
    """A token is the reference's, and equal calls have equal bits."""
    expected, actual = run(arguments(case, "cuda"), "reference"), run(arguments(case, "cuda"), "triton")
    assert_close(actual, expected, 1e-4 if case.dtype == torch.float32 else 2e-2)
    for _ in range(20):
        repeated = run(arguments(case, "cuda"), "triton", consume_state=True)
        assert all(map(torch.equal, repeated, actual))
