"""The Triton kernels: under the interpreter without a GPU (fp32, small), on a GPU as they are."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE, assert_repeats
from .recurrences import PACKED, assert_left_alone, inputs, results, rounded, rows

pytest.importorskip("triton")
from kernels.gpu import plan
from kernels.linear_recurrence.gpu import op as gpu_op
from kernels.linear_recurrence.gpu import plan as gpu_plan

# the fast way for decays per channel overflows where the slow one takes over
pytestmark = [pytest.mark.usefixtures("poison"), pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")]
GATES = ("none", "constant", "head", "channel")
run = partial(results, kernels.linear_recurrence)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Segments of two chunks instead of sixteen."""
    monkeypatch.setattr(gpu_plan, "BLOCK", 128)
    monkeypatch.setattr(gpu_plan, "RESIDENT", 1000)
    plan.of_rows.cache_clear()
    yield
    plan.of_rows.cache_clear()


def compare(
    a: dict[str, Tensor],
    tolerance: float = 1e-5,
    reference: str = "reference",
    op: Callable[..., tuple[Tensor, Tensor | None]] = kernels.linear_recurrence,
    **options: object,
) -> None:
    """Outputs, states and all gradients against the fp32 loop, relative to the norm of each result."""
    a = {name: x.to(DEVICE) for name, x in a.items()}
    exact = {name: x.float() if x.is_floating_point() else x for name, x in a.items()}
    actual, expected = results(op, a, backend="triton", **options), results(op, exact, backend=reference, **options)
    dtypes = {f"gradient of {name}": x.dtype for name, x in a.items()}
    dtypes["o"] = a["v"].dtype if op is kernels.linear_recurrence else torch.float32
    for name, x in expected.items():
        y = actual[name]
        assert (y.shape, y.dtype) == (x.shape, dtypes.get(name, x.dtype)), name
        assert y.isfinite().all(), f"{name} is not finite"
        error, norm = float((y.double() - x.double()).norm()), float(x.double().norm())
        scale = norm
        if name == "gradient of log_decay":
            # a difference of terms like <S, dS>, a constant one over all tokens; where it is far smaller, it is zero
            scale = max(norm, float(expected["state"].norm()) * (x.dim() > 1 or len(a["v"][0])))
        assert error <= tolerance * scale, f"{name}: error {error:.2g} at norm {norm:.2g}"
    assert_left_alone(a, actual)


def held(a: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The arguments, and the gates among them, which get no gradient."""
    gates = {name: x.to(DEVICE) for name, x in a.items() if name in ("log_decay", "beta")}
    return {name: x for name, x in a.items() if name not in gates}, gates


def compare_row(row: dict[str, Any], request: pytest.FixtureRequest, **more: Any) -> None:
    """Compare all results of a row, with the fixtures that it names; gates that it holds have no gradients."""
    sizes = {"B": 1, "G": 1, "K": 16, "V": 16, "dtype": torch.float32, **row}
    for fixture in sizes.pop("fixtures", ()):
        request.getfixturevalue(fixture)
    options = {name: sizes.pop(name) for name in ("through", "tolerance") if name in sizes} | {
        "subheads": row.get("E", 1)
    }
    hold, low = sizes.pop("hold", False), sizes.pop("low", ())
    a = with_resets(inputs(**sizes)) if sizes.pop("resets", False) else inputs(**sizes)
    a, gates = held(a) if hold else (a, {})
    compare({name: x.bfloat16() if name in low else x for name, x in a.items()}, **options | gates | more)


RESET = [0, 31, 63, 64, 65, 100, 101]  # first, last and other tokens of chunks, and neighbours


def with_resets(a: dict[str, Tensor]) -> dict[str, Tensor]:
    """Decays of −inf, per channel in some channels alone as well."""
    a["log_decay"][:, RESET] = -torch.inf
    if a["log_decay"].dim() == 4:
        a["log_decay"][:, 20:120:7, :, ::3] = -torch.inf
    return a


SLOW, NIGHTLY = pytest.mark.slow, (pytest.mark.slow, pytest.mark.nightly)
IN_SEGMENTS = {"T": 320, "documents": [0, 0, 5, 300, 320, 320]}
SMALL = [
    # V ≠ K, neither a power of two; gates from nothing to e^-50 a step
    *(
        row
        for marks, options in ((SLOW, ({"T": 1, "E": 2}, {"T": 63, "E": 2}, {"T": 65})), (NIGHTLY, ({"T": 130},)))
        for row in rows("subheads_and_shared_keys", *options, gate=GATES, decay="mixed", R=2, K=24, V=17, marks=marks)
    ),
    *rows("any_decay", T=70, K=48, gate=GATES[1:], decay=("mild", "zero", "strong"), marks=SLOW),
    *rows("packed_documents", T=200, gate=GATES, decay="mixed", documents=PACKED, marks=SLOW),
    *rows("without_states", T=9, gate=("head", "channel"), state=False, beta=None, documents=[0, 4, 4, 9]),
    *rows("segments", {"T": 320}, IN_SEGMENTS, gate=GATES, fixtures=["short_segments"], marks=SLOW),
    *rows(
        "segments_without_gradients_of_gates",
        *({"T": 320}, IN_SEGMENTS),
        **{"gate": GATES[:3], "E": 2, "hold": True, "fixtures": ["short_segments"], "marks": SLOW},
    ),
    *rows("beta_at_its_ends", T=20, gate=GATES, beta=(None, 0), state=False),
    *rows("one_result", T=20, gate=GATES, through=(("o",), ("state",))),
]


@pytest.mark.parametrize("row", SMALL)
def test_small(row: dict[str, Any], request: pytest.FixtureRequest):
    compare_row(row, request)


def test_what_was_forgotten_is_made_again():
    for length in (3, 66, 3):
        compare(inputs(length, gate="head", B=1, G=1, K=16, V=16, dtype=torch.float32))
        plan.of_rows.cache_clear()


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("beta", [None, "random"])
@pytest.mark.parametrize(("K", "V"), [(16, 16), (24, 17), (48, 16)])
@pytest.mark.parametrize("gate", GATES[:3])
def test_gates_without_gradients(gate: str, K: int, V: int, beta: str | None, request: pytest.FixtureRequest):
    # of so few slices that the passes make the scores themselves, and of more
    row = {"T": 130, "gate": gate, "decay": "mixed", "beta": beta, "R": 2, "K": K, "V": V}
    compare_row(row | {"hold": True}, request)


@pytest.mark.slow
@pytest.mark.parametrize("documents", [None, [0, 7, 100, 200]])
@pytest.mark.parametrize("decays", [(-9.0, -14.0), (-20.0, -29.0), (-0.01, -29.0)])
def test_gradient_of_a_strong_constant_decay(decays: tuple[float, float], documents: list[int] | None):
    """It is e^-9 of the terms on the diagonal or less, and held to its own size, not to theirs."""
    a = inputs(200, gate="constant", B=1, G=1, R=2, K=16, V=16, dtype=torch.float32, documents=documents)
    a = {name: x.to(DEVICE) for name, x in a.items()} | {"log_decay": torch.tensor(decays, device=DEVICE)}
    exact = {name: x.double() if x.is_floating_point() else x for name, x in a.items()}
    name = "gradient of log_decay"
    actual, expected = (
        run(arguments, backend=backend, through=("o",))[name]
        for arguments, backend in ((a, "triton"), (exact, "reference"))
    )
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=2e-5 * float(expected.norm()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "K", "V"),
    [
        *((gate, 31, 37) for gate in GATES),  # no number of equal parts
        ("head", 48, 20),
        ("channel", 32, 32),
        *(pytest.param(gate, 48, 20, marks=pytest.mark.nightly) for gate in ("none", "constant", "channel")),
        *(pytest.param(gate, 32, 32, marks=pytest.mark.nightly) for gate in ("none", "constant", "head")),
    ],
)
def test_long_heads_are_cut(gate: str, K: int, V: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu_op, "largest", lambda op, dtype, device: 16)
    compare(inputs(9, gate=gate, B=2, G=1, E=2, K=K, V=V, dtype=torch.float32), subheads=2)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_long_head_is_cut_into_few_parts(gate: str, monkeypatch: pytest.MonkeyPatch):
    heads, op = [], gpu_op.recurrence
    monkeypatch.setattr(gpu_op, "recurrence", lambda q, *rest: heads.append(q.shape[2]) or op(q, *rest))
    monkeypatch.setattr(gpu_op, "largest", lambda op, dtype, device: 16)
    a = inputs(9, gate=gate, G=1, K=37, V=18, documents=[0, 2, 2, 9], dtype=torch.float32)
    compare(a)
    assert heads == [3]
    a = inputs(9, gate=gate, B=1, G=1, K=37, V=18, state=False, beta=None, dtype=torch.float32)
    compare(a)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_parts_of_a_head_are_whole_blocks(gate: str, monkeypatch: pytest.MonkeyPatch):
    sizes, op = [], gpu_op.recurrence
    monkeypatch.setattr(
        gpu_op, "recurrence", lambda q, k, v, *rest: sizes.append((q.shape, v.shape)) or op(q, k, v, *rest)
    )
    monkeypatch.setattr(gpu_op, "largest", lambda op, dtype, device: 32)
    monkeypatch.setattr(gpu_op, "_whole", lambda part, dtype: -(-part // 8) * 8)  # in fp32, too
    compare(inputs(9, gate=gate, G=1, R=2, E=2, K=20, V=41, documents=[0, 2, 2, 9], dtype=torch.float32), subheads=2)
    assert [(q[-1], v[-1]) for q, v in sizes] == [(24, 24)]


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("E", [1, 2])
def test_token_by_token(gate: str, E: int):
    a = {n: x.to(DEVICE) for n, x in inputs(5, gate=gate, G=2, R=2, E=E, K=24, V=17, dtype=torch.float32).items()}
    with kernels.backend("reference"):
        whole, final = kernels.linear_recurrence(**a, subheads=E, return_state=True)
    state, outputs = a.pop("initial_state"), []
    with kernels.backend("triton"), torch.no_grad():
        for i, j in pairwise(range(6)):
            piece = {name: x if x.dim() == 1 else x[:, i:j] for name, x in a.items()}
            o, state = kernels.linear_recurrence(**piece, initial_state=state, subheads=E, return_state=True)
            outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, final, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gate", "B", "length", "segments"),
    [*((gate, 1, 3, 0) for gate in GATES), ("head", 2, 128, 0), ("head", 2, 130, 4)],
)
def test_registered_as_it_should_be(gate: str, B: int, length: int, segments: int, request: pytest.FixtureRequest):
    if length > 3:
        request.getfixturevalue("short_segments")
    a = inputs(length, gate=gate, B=B, G=1, K=16, V=16, dtype=torch.float32)
    tensors = [a.get(name) for name in ("q", "k", "v", "log_decay", "beta", "initial_state")]
    tensors = [x if x is None else x.to(DEVICE).requires_grad_() for x in tensors]
    op, arguments = torch.ops.token_mixer_zoo.linear_recurrence.default, (*tensors, None, 0.25, 1, True, False)
    torch.library.opcheck(op, arguments)
    assert length == 3 or len(op(*arguments)[2]) == segments  # the states that are kept


def test_fp64_names_another_backend():
    a = {name: x.to(DEVICE) for name, x in inputs(3, K=16, V=16).items()}
    with kernels.backend("triton"), pytest.raises(kernels.UserError, match=r"^backend: .*'triton'.*fp64.*torch"):
        kernels.linear_recurrence(**a)


# on the device: sizes and dtypes of every entry of the launch table
SIZES = [(torch.bfloat16, 128, 128, gate) for gate in GATES]
for _gate in ("head", "channel"):
    SIZES += [
        (torch.bfloat16, K, V, _gate)
        for K, V in ((64, 64), (256, 256), (256, 512), (1024, 128), (80, 48), (100, 36), (16, 64), (32, 64), (64, 16))
    ]
    # of Gated DeltaNet 1.3B and H1 1.3B, long values, one long head of an expansion, and prime numbers
    SIZES += [
        (torch.bfloat16, K, V, _gate)
        for K, V in ((200, 400), (192, 384), (128, 512), (64, 1024), (512, 512), (263, 257))
    ]
    SIZES += [(torch.float32, 200, 400, _gate), (torch.float32, 512, 512, _gate), (torch.float32, 44, 52, _gate)]
    SIZES += [(torch.float16, 128, 128, _gate), (torch.float32, 64, 64, _gate), (torch.float32, 128, 128, _gate)]


def realistic(T: int, gate: str, dtype: torch.dtype, **sizes: int) -> dict[str, Tensor]:
    return rounded(inputs(T, gate=gate, decay="mild", dtype=torch.float32, **sizes), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "K", "V", "gate"), SIZES)
def test_device(dtype: torch.dtype, K: int, V: int, gate: str):
    a = realistic(2500, gate, dtype, B=1, G=2, K=K, V=V)
    compare(a, tolerance=2e-5 if dtype == torch.float32 else 1e-2, reference="torch")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_device_one_wide_head(dtype: torch.dtype):
    """The four heads of GLA-1.3B in one, as StateX merges them, against the fp32 loop."""
    a = realistic(150, "channel", dtype, B=1, G=1, K=1024, V=2048)
    compare(a, tolerance=2e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["mild", "mixed"])
@pytest.mark.parametrize("beta", [None, "random"])
@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (80, 48), (200, 200), (256, 128)])
@pytest.mark.parametrize("gate", GATES[:3])
def test_device_gates_without_gradients(gate: str, K: int, V: int, beta: str | None, decay: str):
    a, gates = held(inputs(1100, gate=gate, decay=decay, beta=beta, B=2, G=2, K=K, V=V, dtype=torch.float32))
    a = rounded(a, torch.bfloat16)
    compare(a, tolerance=1e-2, reference="torch", **gates)
    assert_repeats(partial(run, {name: x.to(DEVICE) for name, x in a.items()}, backend="triton", **gates))


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
def test_device_outputs_are_closer_than_gradients(gate: str):
    a = {n: x.cuda() for n, x in realistic(2500, gate, torch.bfloat16, B=2, G=4, K=128, V=128).items()}
    with torch.no_grad(), kernels.backend("triton"):
        o, state = kernels.linear_recurrence(**a, return_state=True)
    with torch.no_grad(), kernels.backend("torch"):
        expected = kernels.linear_recurrence(**{n: x.float() for n, x in a.items()}, return_state=True)
    for x, y in zip((o, state), expected, strict=True):
        assert float((x.float() - y).norm() / y.norm()) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("decay", ["mixed", "strong", "zero"])
@pytest.mark.parametrize("gate", GATES[1:])
def test_device_extreme_decays(gate: str, decay: str):
    a = inputs(1100, gate=gate, decay=decay, B=1, G=2, K=128, V=128, dtype=torch.float32)
    compare(rounded(a, torch.bfloat16), tolerance=2e-2, reference="torch")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "K", "V", "gate"), SIZES)
def test_device_repeats_bitwise(dtype: torch.dtype, K: int, V: int, gate: str):
    a = {n: x.cuda() for n, x in realistic(3000, gate, dtype, B=2, G=8, K=K, V=V).items()}
    assert_repeats(partial(run, a, backend="triton"), 50)
