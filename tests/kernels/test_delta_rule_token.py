"""A token of a Gated DeltaNet or KDA layer in one launch, next to the three ops that it fuses."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

import kernels

from .places import PLACES

pytest.importorskip("triton")
from kernels.gpu.paths import dry_run

pytestmark = pytest.mark.usefixtures("poison")


class Case(NamedTuple):
    B: int = 2
    H: int = 2
    G: int = 2  # key heads
    K: int = 8
    V: int = 16
    taps: int = 4
    bias: bool = False  # of convolutions and of β
    qk: tuple[str, str] = ("silu", "l2")
    v: tuple[str, str] = ("silu", "none")
    gate_first: bool = False
    weight: bool = True  # of the norm
    largest: float = 1.0
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    channels: bool = False  # a decay for each key channel
    lower_bound: float | None = None
    rank: int | None = None  # of a product that makes the inputs of the decays
    sigmoid: bool = False  # activation of the gate


CASES = [
    Case(),
    Case(B=1, H=1, G=1, K=1, V=1),
    Case(B=3, H=3, G=3, K=12, V=20, bias=True, largest=2.0),
    Case(taps=1, v=("identity", "none"), gate_first=True),
    Case(taps=2, qk=("relu", "l1"), scale=0.7, weight=False),
    Case(taps=7, qk=("elu1", "none"), v=("silu", "l2"), bias=True),
    Case(K=5, V=3, qk=("elu1", "l1"), gate_first=True, weight=False),
    Case(B=1, K=32, V=80),  # two warps
    Case(B=1, K=64, V=128),  # four
    Case(B=1, H=1, G=1, K=128, V=256),  # sixteen
    Case(dtype=torch.bfloat16, bias=True),
    Case(lower_bound=-5.0),
    Case(channels=True, sigmoid=True),
    Case(B=3, H=3, G=3, K=12, V=20, channels=True, lower_bound=-5.0, largest=2.0),
    Case(channels=True, rank=5, sigmoid=True, gate_first=True, bias=True),
    Case(B=1, K=64, V=128, channels=True, rank=8),
    Case(dtype=torch.bfloat16, channels=True, lower_bound=-5.0, sigmoid=True),
]


def arguments(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Arguments whose streams and gates are columns of one projection."""
    B, H, G, K, V, taps, *_ = case
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    decays = case.rank or (H * K if case.channels else H)
    widths = [G * K, G * K, H * V, H * V, decays, H]
    q, k, v, gate, a, b = draw(B, 1, sum(widths) + 3)[..., : sum(widths)].split(widths, -1)
    streams = [
        kernels.FeatureStream(
            x.unflatten(-1, (heads, -1)),
            draw(x.shape[-1], 1, taps),
            draw(x.shape[-1]) if case.bias else None,
            *how,
            history=draw(B, taps - 1, x.shape[-1]),
            return_history=True,
            consume_history=True,
        )
        for x, heads, how in ((q, G, case.qk), (k, G, case.qk), (v, H, case.v))
    ]
    A_log, dt_bias, bias = (draw(H, dtype=torch.float32) for _ in range(3))
    if case.channels:
        dt_bias = draw(H, K, dtype=torch.float32)
        a = a if case.rank else a.unflatten(-1, (H, K))
    up = draw(dt_bias.numel(), case.rank) / case.rank if case.rank else None
    bias_of_b = bias if case.bias else None
    gates = kernels.GateInputs(a, A_log, dt_bias, b, bias_of_b, case.largest, up, case.lower_bound)
    weight = draw(V, dtype=torch.float32) if case.weight else None
    activation: Literal["silu", "sigmoid"] = "sigmoid" if case.sigmoid else "silu"
    norm = kernels.GatedNorm(gate.unflatten(-1, (H, -1)), weight, 1e-5, case.gate_first, activation)
    state = draw(B, H, K, V, dtype=torch.float32)
    return {"streams": streams, "gates": gates, "norm": norm, "initial_state": state, "scale": case.scale}


@torch.no_grad()
def run(a: dict[str, Any], backend: str, **options: Any) -> tuple[Tensor, ...]:
    with kernels.backend(backend):
        y, histories, state = kernels.delta_rule_token(**a, **options)
    return y, *histories, state


def launches(a: dict[str, Any]) -> list[str]:
    with dry_run() as record:
        run(a, "triton")
    return [launch.name for launch in record.launches]


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float):
    for x, y in zip(actual, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert float((x - y).detach().double().norm()) <= tolerance * max(float(y.detach().double().norm()), 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_the_three_ops(case: Case, device: str):
    expected = run(arguments(case, device), "reference")
    with kernels.implementations() as ran:
        actual = run(arguments(case, device), "triton", consume_state=True)
    assert ran == {op: {"triton"} for op in ("delta_rule", "linear") if op == "delta_rule" or case.rank}
    assert launches(arguments(case, device))[-1] == "delta_rule.token.advance_token"
    # in bf16 the reference does not round features
    assert_close(actual, expected, 2e-2 if case.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("device", PLACES)
def test_states_are_overwritten_only_if_they_may_be(device: str):
    a = arguments(Case(), device)
    before = a["initial_state"].clone()
    for stream in a["streams"]:
        stream.consume_history = False
    histories = [stream.history.clone() for stream in a["streams"]]
    first = run(a, "triton")
    assert torch.equal(a["initial_state"], before)
    assert all(torch.equal(stream.history, past) for stream, past in zip(a["streams"], histories, strict=True))
    for stream in a["streams"]:
        stream.consume_history = True
    second = run(a, "triton", consume_state=True)
    assert second[-1].data_ptr() == a["initial_state"].data_ptr()
    assert all(h.data_ptr() == s.history.data_ptr() for h, s in zip(second[1:4], a["streams"], strict=True))
    assert_close(second, first, 0)


@pytest.mark.parametrize("device", PLACES)
def test_states_in_other_dtypes_and_layouts(device: str):
    a = arguments(Case(), device)
    expected = run({**a, "initial_state": a["initial_state"].bfloat16().float()}, "triton")
    a = arguments(Case(), device)
    assert_close(run({**a, "initial_state": a["initial_state"].bfloat16()}, "triton", consume_state=True), expected, 0)
    a = arguments(Case(), device)
    transposed = a["initial_state"].bfloat16().float().mT.contiguous().mT
    assert_close(run({**a, "initial_state": transposed}, "triton", consume_state=True), expected, 0)


ELSEWHERE: dict[str, Callable[[dict[str, Any]], object]] = {
    "a gradient": lambda a: a["gates"].A_log.requires_grad_(),
    "another dtype": lambda a: setattr(a["gates"], "a", a["gates"].a.bfloat16()),
    "no convolution": lambda a: a["streams"].__setitem__(
        2, kernels.FeatureStream(a["streams"][2].x, return_history=True)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("why", [*ELSEWHERE, "shared keys", "a long key", "deterministic"])
def test_other_calls_run_the_three_ops(why: str):
    case = Case(G=1) if why == "shared keys" else Case(K=130, V=256) if why == "a long key" else Case()
    a, b = arguments(case), arguments(case)
    for each in (a, b):
        ELSEWHERE.get(why, lambda a: None)(each)
    with torch.set_grad_enabled(why == "a gradient"), kernels.deterministic(why == "deterministic"):
        with dry_run() as record, kernels.backend("triton"):
            kernels.delta_rule_token(**a)
        assert "delta_rule.token.advance_token" not in [launch.name for launch in record.launches]
        results = []
        for each, name in ((arguments(case), "torch"), (b, "reference")):
            ELSEWHERE.get(why, lambda a: None)(each)
            with kernels.backend(name):
                y, histories, state = kernels.delta_rule_token(**each)
            results.append((y, *histories, state))
    assert_close(*results, 1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"streams": []}, "streams: expected those of q, k and v, got 0"),
        ({"initial_state": torch.zeros(2, 2, 8, 15)}, r"initial_state: expected \[2, 2, 8, 16\], got shape"),
        ({"norm": kernels.GatedNorm(torch.zeros(2, 1, 2, 15), None, 0.0)}, r"norm.gate: expected \[2, 1, 2, 16\], got"),
        (
            {"norm": kernels.GatedNorm(torch.zeros(2, 1, 2, 16), torch.zeros(15), 0.0)},
            r"norm.weight: expected \[16\], got",
        ),
        (
            {
                "gates": kernels.GateInputs(
                    torch.zeros(2, 1, 2, 7), torch.zeros(2), torch.zeros(2, 7), torch.zeros(2, 1, 2)
                )
            },
            r"gates.dt_bias: expected \[2, 8\], got shape \(2, 7\)",
        ),
        (
            {"norm": kernels.GatedNorm(torch.zeros(2, 1, 2, 16), None, 0.0, activation="tanh")},
            "norm.activation: 'tanh' is not one of silu, sigmoid",
        ),
        ({"initial_state": torch.zeros(2, 2, 8, 16, device="meta")}, "initial_state: expected floats on cpu, got"),
        ({"initial_state": torch.zeros(2, 2, 8, 16).long()}, "initial_state: expected floats on cpu, got torch.int64"),
        ({"scale": float("nan")}, "scale: must be a finite number, got nan"),
        ({"gates": kernels.GateInputs(*[torch.zeros(3)] * 4)}, r"gates: expected \[2, 1, 2\], got shape \(3,\)"),
    ],
)
def test_misfits(change: dict[str, Any], said: str):
    with kernels.backend("triton"), torch.no_grad(), pytest.raises(ValueError, match=f"^{said}"):
        kernels.delta_rule_token(**(arguments(Case()) | change))


def test_streams_that_are_no_token():
    a = arguments(Case())
    longer = [kernels.FeatureStream(s.x.repeat(1, 2, 1, 1), return_history=True) for s in a["streams"]]
    for streams, said in (
        (longer, "streams: expected one token of each sequence, got 2"),
        ([*a["streams"][:2], kernels.FeatureStream(a["streams"][2].x)], "streams: return_history has to be set"),
        ([a["streams"][2], *a["streams"][1:]], "streams: expected q and k"),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            kernels.delta_rule_token(**(a | {"streams": streams}))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(B=1, H=8, G=8, K=128, V=128, dtype=torch.bfloat16),
        Case(B=64, H=8, G=8, K=128, V=128, dtype=torch.bfloat16, bias=True, largest=2.0),
        Case(B=3, H=4, G=4, K=96, V=192, dtype=torch.bfloat16),
        Case(B=2, H=4, G=4, K=128, V=256, dtype=torch.float16, gate_first=True),
        Case(B=5, H=6, G=6, K=64, V=64),
        Case(B=5, H=2, G=2, K=256, V=128),
        Case(B=1, H=8, G=8, K=128, V=128, dtype=torch.bfloat16, channels=True, rank=128, sigmoid=True),
        Case(B=64, H=8, G=8, K=128, V=128, dtype=torch.bfloat16, channels=True, lower_bound=-5.0, sigmoid=True),
        Case(B=5, H=6, G=6, K=64, V=64, channels=True),
    ],
)
def test_on_device(case: Case):
    """A token is the reference's, and equal calls have equal bits."""
    expected, (y, *_, state) = run(arguments(case, "cuda"), "reference"), run(arguments(case, "cuda"), "triton")
    tolerance = 1e-4 if case.dtype == torch.float32 else 2e-2
    assert_close((y, state), (expected[0], expected[-1]), tolerance)
    for _ in range(20):
        repeated = run(arguments(case, "cuda"), "triton", consume_state=True)
        assert torch.equal(repeated[0], y)
        assert torch.equal(repeated[-1], state)
