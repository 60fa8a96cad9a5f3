"""Properties of both matrix-state recurrences, on every kind of decay that they take."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch

import kernels

from .recurrences import BAD_BOUNDARIES, DECAYS, LENGTHS, MISFITS, PACKED, TOLERANCE, assert_same, inputs, results

Op = Callable[..., Any]
OPS: dict[Op, tuple[str, ...]] = {  # with the kinds of decays that are tested; the last is the most general
    kernels.linear_recurrence: ("none", "constant", "head", "channel"),
    kernels.delta_rule: ("none", "constant", "head"),
}


class Case(NamedTuple):
    """An op and a kind of decay; one parameter, so that `pairwise` keeps both together."""

    op: Op
    gate: str

    def __str__(self) -> str:
        return f"{self.op.__name__}-{self.gate}"


CASES = [Case(op, gate) for op, gates in OPS.items() for gate in gates]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@each_case
@pytest.mark.parametrize("length", LENGTHS)
def test_backends_agree(length: int, case: Case, dtype: torch.dtype):
    # subheads, shared keys, V ≠ K and a first state at once: what is mixed up in one of them shows
    a = inputs(length, gate=case.gate, decay="mixed", G=2, R=2, E=3, dtype=dtype)
    assert_same(results(case.op, a, subheads=3), results(case.op, a, subheads=3, backend="reference"))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("case", [case for case in CASES if case.gate != "none"], ids=str)
def test_any_decay(case: Case, decay: str, dtype: torch.dtype, request: pytest.FixtureRequest):
    if (str(case), decay, dtype) == ("linear_recurrence-constant", "mixed", torch.float32):
        reason = "the gradient of a constant decay sums terms of either sign: error 4e-5 of its norm, allowed 1e-5"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=False))
    # 131 tokens: two full chunks and a ragged one
    a = inputs(131, gate=case.gate, decay=decay, dtype=dtype)
    assert_same(results(case.op, a), results(case.op, a, backend="reference"), TOLERANCE[dtype])


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(
    ("case", "beta"),
    [
        pytest.param(case, beta, marks=[pytest.mark.slow] * (case.op is kernels.linear_recurrence), id=f"{case}-{beta}")
        for case in CASES
        for beta in ("random", None)
        if beta is not None or case.op is kernels.linear_recurrence
    ],
)
def test_packed_documents(case: Case, state: bool, beta: str | None):
    a = inputs(200, gate=case.gate, decay="mixed", beta=beta, G=1, R=2, E=2, documents=PACKED, state=state)
    actual = results(case.op, a, subheads=2)
    assert_same(actual, results(case.op, a, subheads=2, backend="reference"))
    # … and each document alone gives the same
    del a["cu_seqlens"]
    for n, (i, j) in enumerate(pairwise(PACKED)):
        first = a["initial_state"][n : n + 1] if state else torch.zeros(1, 4, 8, 6, dtype=torch.float64)
        if i == j:
            assert torch.equal(actual["state"][n : n + 1], first)
            continue
        alone = {name: x if x.dim() == 1 else x[:, i:j] for name, x in a.items()}
        o, S = case.op(**{**alone, "initial_state": first}, subheads=2, return_state=True)
        torch.testing.assert_close(actual["o"][:, i:j], o)
        torch.testing.assert_close(actual["state"][n : n + 1], S)


@each_case
def test_documents_of_whole_chunks(case: Case):
    # no padding anywhere is a path of its own
    a = inputs(192, gate=case.gate, G=1, R=2, documents=[0, 64, 192])
    assert_same(results(case.op, a), results(case.op, a, backend="reference"))


@each_case
def test_gradient_through_the_state_alone(case: Case):
    a = inputs(70, gate=case.gate, E=2)
    actual = results(case.op, a, subheads=2, through=("state",))
    assert_same(actual, results(case.op, a, subheads=2, through=("state",), backend="reference"))
    assert not actual["gradient of q"].any()
    assert all(actual[f"gradient of {name}"].any() for name in a if name != "q")


@each_case
def test_bf16_inputs(case: Case):
    # gates and states stay in fp32, as mixers make them
    a = inputs(130, gate=case.gate, decay="mixed", R=2, E=2, dtype=torch.float32)
    a.update({name: a[name].bfloat16() for name in "qkv"})
    actual, expected = results(case.op, a, subheads=2), results(case.op, a, subheads=2, backend="reference")
    assert (actual["o"].dtype, actual["state"].dtype) == (torch.bfloat16, torch.float32)
    assert_same({"state": actual["state"]}, {"state": expected["state"]})
    # both compute in fp32: what differs is a last bit of bf16 here and there
    assert_same(actual, expected, tolerance=1e-3)


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", ["reference", "torch"])
@each_case
@pytest.mark.parametrize("bounds", [[0, 64, 130], [0, 1, 66, 67, 130], list(range(131))])
def test_whole_is_pieces(bounds: list[int], case: Case, backend: str):
    a = inputs(130, gate=case.gate, R=2, E=2)
    with kernels.backend(backend):
        whole, final = case.op(**a, subheads=2, return_state=True)
        state, outputs = a.pop("initial_state"), []
        for i, j in pairwise(bounds):
            piece = {name: x if x.dim() == 1 else x[:, i:j] for name, x in a.items()}
            o, state = case.op(**piece, initial_state=state, subheads=2, return_state=True)
            outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    torch.testing.assert_close(state, final)


@each_case
@pytest.mark.parametrize("length", [1, 70])
def test_autocast_changes_nothing(length: int, case: Case):
    a = inputs(length, gate=case.gate, dtype=torch.float32)
    o, state = case.op(**a, return_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        cast_o, cast_state = case.op(**a, return_state=True)
    assert torch.equal(cast_o, o)
    assert torch.equal(cast_state, state)


@each_case
def test_shared_keys_are_repeated_keys(case: Case):
    G, R, E = 2, 3, 2
    a = inputs(70, gate=case.gate, G=G, R=R, E=E)
    repeated = dict(a)
    for name in "qk":
        repeated[name] = a[name].unflatten(2, (G, E)).repeat_interleave(R, 2).flatten(2, 3)
    actual, expected = results(case.op, a, subheads=E), results(case.op, repeated, subheads=E)
    for name in "qk":
        gradient = expected[f"gradient of {name}"].unflatten(2, (G, R, E)).sum(3).flatten(2, 3)
        expected[f"gradient of {name}"] = gradient
    assert_same(actual, expected)


@each_case
def test_subheads_sum_their_outputs(case: Case):
    E, a = 3, inputs(70, gate=case.gate, G=2, R=2, E=3)
    total = 0
    for e in range(E):
        part = {"q": a["q"][:, :, e::E], "k": a["k"][:, :, e::E], "v": a["v"], "beta": a["beta"][..., e::E]}
        part["initial_state"] = a["initial_state"][:, e::E]
        if case.gate != "none":
            part["log_decay"] = a["log_decay"][..., e::E, :] if case.gate == "channel" else a["log_decay"][..., e::E]
        total = total + case.op(**part)[0]
    torch.testing.assert_close(case.op(**a, subheads=E)[0], total)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("length", [1, 70])
@each_op
def test_views_of_one_projection(op: Op, length: int, backend: str):
    widths = {"q": 2 * 8, "k": 2 * 8, "v": 4 * 6, "log_decay": 4, "beta": 4}
    fused = torch.rand(2, length, sum(widths.values()), dtype=torch.float64) / 4
    parts = dict(zip(widths, fused.split(list(widths.values()), -1), strict=True))
    views = {name: x.unflatten(-1, (2 if name in "qk" else 4, -1)) for name, x in parts.items()}
    views["log_decay"], views["beta"] = -parts["log_decay"], parts["beta"]
    assert not views["q"].is_contiguous() or length == 1
    copies = {name: x.contiguous() for name, x in views.items()}
    assert_same(results(op, views, backend=backend), results(op, copies, backend=backend))


@each_op
def test_scale_defaults_to_the_key_size_and_state_is_only_given_on_request(op: Op):
    a = inputs(10, K=16)
    o, state = op(**a)
    assert state is None
    torch.testing.assert_close(op(**a, scale=1.0)[0] / math.sqrt(16), o)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("length", [1, 70])
@each_op
def test_arguments_stay_as_they_were(op: Op, length: int, backend: str):
    a = inputs(length, gate=OPS[op][-1], E=2)
    before = {name: x.clone() for name, x in a.items()}
    with kernels.backend(backend):
        op(**a, subheads=2, return_state=True)
    assert all(torch.equal(a[name], before[name]) for name in a)


@pytest.mark.parametrize(
    ("name", "change"),
    [*MISFITS, ("log_decay", lambda x: x[..., None].expand(-1, -1, -1, 5))],
)
@each_op
def test_errors_name_the_argument(op: Op, name: str, change):
    a = {**inputs(10, R=2), "subheads": 1}
    op(**a)  # right as they are
    a[name] = change(a.get(name))
    with pytest.raises(ValueError, match=rf"^{name}: "):
        op(**a)


@pytest.mark.parametrize("length", [1, 10])
@pytest.mark.parametrize("double", [["beta", "initial_state"], ["q", "k", "v", "log_decay"]])
@each_op
def test_gates_and_states_in_another_precision(op: Op, double: list[str], length: int):
    a = inputs(length, R=2)
    mixed = {name: x if name in double else x.float() for name, x in a.items()}
    o, state = op(**mixed, return_state=True)
    assert o.dtype == state.dtype == mixed["q"].dtype
    for actual, expected in zip((o, state), op(**a, return_state=True), strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@each_op
def test_no_token_is_an_error(op: Op):
    a = inputs(3, state=False)
    with pytest.raises(ValueError, match=r"^q: .* at least one token"):
        op(**{name: x[:, :0] for name, x in a.items()})


@pytest.mark.parametrize("bounds", BAD_BOUNDARIES)
@each_op
def test_boundaries_that_do_not_fit(op: Op, bounds: list):
    a = inputs(10, B=1, state=False)
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        op(**a, cu_seqlens=torch.tensor(bounds))


@each_op
def test_boundaries_on_another_device(op: Op):
    a = inputs(10, B=1, state=False)
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        op(**a, cu_seqlens=torch.tensor([0, 10], device="meta"))


@each_op
def test_a_state_per_document(op: Op):
    a = inputs(10, documents=[0, 4, 10])
    a["initial_state"] = a["initial_state"][:1]
    with pytest.raises(ValueError, match=r"^initial_state: "):
        op(**a)
