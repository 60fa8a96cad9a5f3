"""A token of a layer with a matrix state in one launch, next to the ops that it fuses."""

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
    delta: bool = True
    # or none, strength, channels, product, constant, head, channel, steps, tied and layers, or exponential or logistic
    # (of mLSTM) and a factor
    gates: str = "delta"
    turn: str = "none"  # pairs, doubled
    skip: bool = False
    norm: str = "gated"  # norm, centred or none
    steps: int = 1
    feedback: str = "none"  # rate, correction or unit
    cap: float | None = None
    divisor: bool = False
    stabiliser: float = 0.0  # that of earlier tokens


MLSTM = Case(
    delta=False, gates="exponential 1", divisor=True, norm="centred", sigmoid=True, taps=0, qk=("identity", "none")
)
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
    Case(H=6, G=2, skip=True),
    Case(gates="channels", qk=("silu", "l2")),
    Case(gates="channels", K=12, V=20, largest=2.0, lower_bound=-5.0, channels=True, taps=0, sigmoid=True),
    Case(gates="product", steps=3, H=6, G=2, bias=True, largest=2.0, turn="pairs"),
    Case(gates="product", steps=2, dtype=torch.bfloat16),
    Case(gates="strength", steps=2, K=12, V=5, taps=0, norm="none"),
    Case(feedback="rate", qk=("silu", "none")),
    Case(feedback="correction", qk=("silu", "none"), H=4, G=2, K=12, V=20),
    Case(feedback="unit", qk=("silu", "none"), sigmoid=True, dtype=torch.bfloat16),
    Case(gates="strength", bias=True, norm="norm", largest=2.0),
    Case(gates="none", norm="none", K=5, V=3),
    Case(delta=False, gates="constant", turn="pairs", taps=1),
    Case(delta=False, gates="none", turn="pairs", taps=0, qk=("relu", "none"), v=("identity", "none"), norm="norm"),
    Case(delta=False, gates="none", turn="doubled", taps=0, K=12, norm="none"),
    Case(delta=False, gates="constant", turn="doubled", B=3, H=6, G=2, V=20, norm="none"),
    Case(delta=False, gates="channel", taps=0, K=12, V=5, qk=("identity", "none")),
    Case(delta=False, gates="head", taps=0, turn="doubled", gate_first=True),
    Case(delta=False, gates="steps", H=6, G=2, bias=True, skip=True, gate_first=True, scale=1.0),
    Case(delta=False, gates="steps", H=3, G=1, K=12, V=20, skip=True, norm="none", scale=1.0),
    Case(delta=False, gates="tied", taps=0, qk=("identity", "none"), v=("identity", "none"), norm="none"),
    Case(delta=False, gates="tied 5", taps=0, K=12, qk=("identity", "none"), norm="none"),
    Case(delta=False, gates="tied 2", B=1, H=1, G=1, K=1, V=1, qk=("identity", "none"), norm="norm"),
    Case(delta=False, gates="channel", turn="pairs", dtype=torch.bfloat16, bias=True),
    Case(delta=False, gates="tied 3", dtype=torch.bfloat16, qk=("identity", "none"), norm="none"),
    MLSTM,
    MLSTM._replace(gates="exponential 50", K=12, V=20, B=3, stabiliser=-60.0),
    MLSTM._replace(gates="exponential 50", cap=15.0, stabiliser=1e4),
    MLSTM._replace(dtype=torch.bfloat16, cap=15.0),
    MLSTM._replace(gates="exponential 4", cap=15.0, norm="none"),
    MLSTM._replace(gates="logistic 50", sigmoid=False, gate_first=True),
    MLSTM._replace(gates="logistic 1", divisor=False, cap=2.0, B=1, K=64, V=128),
    MLSTM._replace(gates="channel", H=6, G=2, turn="doubled", taps=4, norm="norm"),
    Case(delta=False, gates="none", norm="centred", skip=True, K=5, V=3),
]


def arguments(case: Case, device: str = "cpu") -> dict[str, Any]:
    """Arguments whose streams and gates are columns of one projection."""
    B, H, G, K, V, taps, *_ = case
    width = 2 * K if case.turn == "doubled" else K  # rows of the state
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    decays = case.rank or (H * K if case.channels else H)
    n = case.steps
    widths = [G * K, n * G * K, n * H * V, H * V, decays, n * H, H * K, H * V]
    q, k, v, gate, a, b, b_channels, w = draw(B, 1, sum(widths) + 3)[..., : sum(widths)].split(widths, -1)
    streams = [
        kernels.FeatureStream(
            x.unflatten(-1, (heads, -1)),
            draw(x.shape[-1], 1, taps) if taps else None,
            draw(x.shape[-1]) if case.bias and taps else None,
            *how,
            history=draw(B, max(taps - 1, 0), x.shape[-1]),
            return_history=True,
            consume_history=True,
        )
        for x, heads, how in ((q, G, case.qk), (k, n * G, case.qk), (v, n * H, case.v))
    ]
    A_log, dt_bias, bias = (draw(size, dtype=torch.float32) for size in (H, H, n * H))
    if case.channels:
        dt_bias = draw(H, K, dtype=torch.float32)
        a = a if case.rank else a.unflatten(-1, (H, K))
    up = draw(dt_bias.numel(), case.rank) / case.rank if case.rank else None
    bias_of_b = bias if case.bias else None
    kind, _, number = case.gates.partition(" ")
    layers = factor = int(number or 0)
    raw = [x * factor for x in (a, b)]
    carried = (draw(B, H, dtype=torch.float64) + case.stabiliser,) if kind == "exponential" else ()
    decay_only = kernels.GateInputs(a, A_log, dt_bias, None, up=up, lower_bound=case.lower_bound)
    decay, beta = {
        "delta": lambda: (
            kernels.GateInputs(a, A_log, dt_bias, b, bias_of_b, case.largest, up, case.lower_bound),
            None,
        ),
        "none": lambda: (None, None),
        "strength": lambda: (None, kernels.Strength(b, bias_of_b, case.largest)),
        "channels": lambda: (decay_only, kernels.ChannelStrength(b_channels, w, case.largest)),
        "product": lambda: (decay_only, kernels.Strength(b, bias_of_b, case.largest)),
        "constant": lambda: (-draw(H, dtype=torch.float32).abs(), None),
        "head": lambda: (-draw(B, 1, H, dtype=torch.float32).abs(), None),
        "channel": lambda: (-draw(B, 1, H, width, dtype=torch.float32).abs(), None),
        "steps": lambda: (decay_only, None),
        "tied": lambda: (kernels.TiedGates(draw(layers, H * width) if layers else None, max(layers // 2, 1)), None),
        "exponential": lambda: (kernels.CappedGates(*raw, A_log, dt_bias, case.cap), None),
        "logistic": lambda: (kernels.CappedGates(*raw, A_log, dt_bias, case.cap, exponential=False), None),
    }[kind]()
    centred = case.norm == "centred"
    weight = draw(*((H, V) if centred else (V,)), dtype=torch.float32) if case.weight else None
    activation: Literal["silu", "sigmoid"] = "sigmoid" if case.sigmoid else "silu"
    gate = gate.unflatten(-1, (H, -1))
    norm = {
        "gated": kernels.GatedNorm(gate, weight, 1e-5, case.gate_first, activation),
        "norm": kernels.GatedNorm(None, weight, 1e-5),
        "none": None,
    }["gated" if centred else case.norm]
    state = draw(B, H, width, V + case.divisor, dtype=torch.float32)
    seen = torch.arange(7, 7 + B, device=device)
    shape = {"pairs": (K // 2,), "doubled": (G, K)}.get(case.turn)
    turn = None if shape is None else kernels.Turn(seen, draw(*shape, dtype=torch.float32).abs(), 1.2)
    skip = draw(H, dtype=torch.float32) if case.skip else None
    rate, correction = draw(G, dtype=torch.float32), draw(G, dtype=torch.float32)
    feedback = {
        "none": None,
        "rate": kernels.Feedback(rate, None),
        "correction": kernels.Feedback(rate, correction),
        "unit": kernels.Feedback(rate, correction, unit=True),
    }[case.feedback]
    ops = kernels.TokenOps(case.delta, decay, beta, norm, turn, feedback, skip, n, case.scale)
    ops = ops._replace(centred=centred, divisor_eps=1e-6 if case.divisor else None, carried=carried)
    return {"streams": streams, "ops": ops, "initial_state": state}


@torch.no_grad()
def run(a: dict[str, Any], backend: str, **options: Any) -> tuple[Tensor, ...]:
    with kernels.backend(backend):
        token = kernels.recurrence_token(**a, **options)
    position = [] if token.position is None else [token.position]
    return token.y, *token.histories, *position, *token.carried, token.state


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
def test_the_ops(case: Case, device: str):
    expected = run(arguments(case, device), "reference")
    with kernels.implementations() as ran:
        actual = run(arguments(case, device), "triton", consume_state=True)
    assert ran == {op: {"triton"} for op in ("recurrence_token", "linear") if op != "linear" or case.rank}
    assert launches(arguments(case, device))[-1] == "recurrence_token.op.advance_token"
    # in bf16 the reference does not round features
    assert_close(actual, expected, 2e-2 if case.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("case", [Case(), MLSTM._replace(taps=4)])
@pytest.mark.parametrize("device", PLACES)
def test_states_are_overwritten_only_if_they_may_be(device: str, case: Case):
    a = arguments(case, device)
    before, carried = a["initial_state"].clone(), [x.clone() for x in a["ops"].carried]
    for stream in a["streams"]:
        stream.consume_history = False
    histories = [stream.history.clone() for stream in a["streams"]]
    first = run(a, "triton")
    assert torch.equal(a["initial_state"], before)
    assert all(map(torch.equal, a["ops"].carried, carried))
    assert all(torch.equal(stream.history, past) for stream, past in zip(a["streams"], histories, strict=True))
    for stream in a["streams"]:
        stream.consume_history = True
    second = run(a, "triton", consume_state=True)
    assert second[-1].data_ptr() == a["initial_state"].data_ptr()
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(second[4:-1], a["ops"].carried, strict=True))
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
    "a gradient": lambda a: a["ops"].decay.A_log.requires_grad_(),
    "another dtype": lambda a: setattr(a["ops"].decay, "a", a["ops"].decay.a.bfloat16()),
}


@pytest.mark.slow
@pytest.mark.parametrize("why", [*ELSEWHERE, "part of a head turns", "a long key", "deterministic"])
def test_other_calls_run_the_ops(why: str):
    case = Case(K=12, turn="pairs") if "turns" in why else Case(K=130, V=256) if why == "a long key" else Case()
    a, b = arguments(case), arguments(case)
    for each in (a, b):
        ELSEWHERE.get(why, lambda a: None)(each)
    with torch.set_grad_enabled(why == "a gradient"), kernels.deterministic(why == "deterministic"):
        with dry_run() as record, kernels.backend("triton"):
            kernels.recurrence_token(**a)
        assert "recurrence_token.op.advance_token" not in [launch.name for launch in record.launches]
        results = []
        for each, name in ((arguments(case), "torch"), (b, "reference")):
            ELSEWHERE.get(why, lambda a: None)(each)
            with kernels.backend(name):
                token = kernels.recurrence_token(**each)
            results.append((token.y, *token.histories, token.state))
    assert_close(*results, 1e-5)


HEADS = torch.zeros(2, 1, 2)
CAPPED = kernels.CappedGates(HEADS, HEADS, torch.zeros(2), torch.zeros(2))
LINEAR: dict[str, Any] = {"delta": False, "carried": (torch.zeros(2, 2),)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"norm": kernels.GatedNorm(torch.zeros(2, 1, 2, 15), None, 0.0)}, r"norm.gate: expected \[2, 1, 2, 16\], got"),
        ({"norm": kernels.GatedNorm(None, torch.zeros(15), 0.0)}, r"norm.weight: expected \[16\], got"),
        (
            {"norm": kernels.GatedNorm(torch.zeros(2, 1, 2, 16), None, 0.0, activation="tanh")},
            "norm.activation: 'tanh' is not one of silu, sigmoid",
        ),
        (
            {"decay": kernels.GateInputs(torch.zeros(2, 1, 2, 7), torch.zeros(2), torch.zeros(2, 7), HEADS)},
            r"decay.dt_bias: expected \[2, 8\], got shape \(2, 7\)",
        ),
        ({"decay": kernels.GateInputs(*[torch.zeros(3)] * 4)}, r"decay: expected \[2, 1, 2\], got shape \(3,\)"),
        ({"decay": torch.zeros(2, 1, 2, 7)}, r"decay: expected \[2, 1, 2, 8\], got shape \(2, 1, 2, 7\)"),
        ({"decay": torch.zeros(3)}, r"decay: expected \[2\], got shape \(3,\)"),
        ({"decay": kernels.TiedGates(torch.zeros(3, 15), 1)}, r"decay.bounds: expected \[3, 16\], got shape \(3, 15\)"),
        ({"decay": kernels.TiedGates(torch.zeros(3, 16), 3)}, "decay.layer: must be from 1 to 2, got 3"),
        ({"decay": None, "beta": kernels.Strength(torch.zeros(2, 1, 3))}, r"beta.b: expected \[2, 1, 2\], got shape"),
        (
            {"decay": None, "beta": kernels.ChannelStrength(torch.zeros(2, 1, 16), torch.zeros(2, 1, 31))},
            r"beta.w: expected \[2, 1, 32\], got shape \(2, 1, 31\)",
        ),
        (
            {"delta": False, "feedback": kernels.Feedback(torch.zeros(2), None)},
            "delta: steps, feedback and",
        ),
        ({"feedback": kernels.Feedback(torch.zeros(3), None)}, r"feedback.rate: expected \[2\], got shape \(3,\)"),
        ({"turn": kernels.Turn(torch.zeros(3), torch.zeros(4))}, r"turn.positions: expected \[2\], got shape \(3,\)"),
        (
            {"turn": kernels.Turn(torch.zeros(2), torch.zeros(2, 7))},
            r"turn.rates: expected \[2, 8\], got shape",
        ),
        ({"skip": torch.zeros(3)}, r"skip: expected \[2\], got shape \(3,\)"),
        ({"steps": 2}, r"streams: expected q \[B,1,G,K\], k \[B,1,2·G,K\] and v \[B,1,2·H,V\], H a multiple of G, got"),
        ({"scale": float("nan")}, "scale: must be a finite number, got nan"),
        (
            {"norm": kernels.GatedNorm(None, torch.zeros(16), 0.0), "centred": True},
            r"norm.weight: expected \[2, 16\], got",
        ),
        ({"divisor_eps": 0.0}, "divisor_eps: only a linear recurrence without a skip has a divisor"),
        ({"carried": (torch.zeros(2, 2),)}, "carried: expected 0 tensors, got 1"),
        ({"decay": CAPPED}, "decay: CappedGates are those of a linear recurrence without a separate β"),
        ({"decay": CAPPED, "delta": False}, "carried: expected 1 tensors, got 0"),
        ({"decay": CAPPED, "delta": False, "carried": (torch.zeros(2),)}, r"carried: expected \[2, 2\], got shape"),
        ({"decay": CAPPED._replace(i=HEADS[0]), **LINEAR}, r"decay.i: expected \[2, 1, 2\], got shape \(1, 2\)"),
        ({"decay": CAPPED._replace(f_bias=HEADS), **LINEAR}, r"decay.f_bias: expected \[2\], got shape \(2, 1, 2\)"),
        ({"beta": kernels.Strength(HEADS)}, "beta: with several steps, or a separate β, `decay` must not have b"),
    ],
)
def test_ops_that_do_not_fit(change: dict[str, Any], said: str):
    a = arguments(Case())
    with kernels.backend("triton"), torch.no_grad(), pytest.raises(ValueError, match=f"^{said}"):
        kernels.recurrence_token(**(a | {"ops": a["ops"]._replace(**change)}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"streams": []}, "streams: expected those of q, k and v, got 0"),
        ({"initial_state": torch.zeros(2, 2, 8, 15)}, r"initial_state: expected \[2, 2, 8, 16\], got shape"),
        ({"initial_state": torch.zeros(2, 2, 8, 16, device="meta")}, "initial_state: expected floats on cpu, got"),
        ({"initial_state": torch.zeros(2, 2, 8, 16).long()}, "initial_state: expected floats on cpu, got torch.int64"),
    ],
)
def test_misfits(change: dict[str, Any], said: str):
    with kernels.backend("triton"), torch.no_grad(), pytest.raises(ValueError, match=f"^{said}"):
        kernels.recurrence_token(**(arguments(Case()) | change))


def test_streams_that_are_no_token():
    a = arguments(Case())
    longer = [kernels.FeatureStream(s.x.repeat(1, 2, 1, 1), return_history=True) for s in a["streams"]]
    for streams, said in (
        (longer, "streams: expected one token of each sequence, got 2"),
        ([*a["streams"][:2], kernels.FeatureStream(a["streams"][2].x)], "streams: return_history has to be set"),
        ([a["streams"][2], *a["streams"][1:]], r"streams: expected q \[B,1,G,K\]"),
    ):
        with pytest.raises(ValueError, match=f"^{said}"):
            kernels.recurrence_token(**(a | {"streams": streams}))


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
        Case(B=3, H=8, G=2, K=128, V=128, dtype=torch.bfloat16, feedback="correction", qk=("silu", "none")),
        Case(B=3, H=4, G=4, K=128, V=128, dtype=torch.bfloat16, gates="channels", channels=True, sigmoid=True),
        Case(B=3, H=4, G=4, K=128, V=128, dtype=torch.bfloat16, gates="product", steps=2),
        Case(B=3, H=4, G=4, K=128, V=128, dtype=torch.bfloat16, gates="strength", norm="norm"),
        Case(B=3, H=8, G=8, K=64, V=128, dtype=torch.bfloat16, delta=False, gates="channel", taps=0),
        Case(B=3, H=8, G=8, K=128, V=256, dtype=torch.bfloat16, delta=False, gates="constant", taps=0, turn="pairs"),
        Case(B=3, H=8, G=8, K=128, V=128, delta=False, gates="none", taps=0, turn="pairs", norm="norm"),
        Case(B=3, H=8, G=8, K=128, V=128, dtype=torch.bfloat16, delta=False, gates="none", taps=0, turn="doubled"),
        Case(B=3, H=6, G=6, K=96, V=96, delta=False, gates="constant", taps=0, turn="doubled", norm="none"),
        Case(B=3, H=32, G=1, K=128, V=64, dtype=torch.bfloat16, delta=False, gates="steps", norm="none", skip=True),
        Case(B=3, H=8, G=8, K=128, V=128, dtype=torch.bfloat16, delta=False, gates="tied", taps=0, norm="none"),
        Case(B=3, H=6, G=6, K=96, V=96, delta=False, gates="tied 24", taps=4, norm="none"),
        MLSTM._replace(B=64, H=8, G=8, K=64, V=128, dtype=torch.bfloat16, cap=15.0),
        MLSTM._replace(B=3, H=4, G=4, K=96, V=192, gates="exponential 50", stabiliser=-60.0),
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
