"""Properties of all recurrences, on every kind of decay that they take."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import kernels

from .recurrences import (
    BAD_BOUNDARIES,
    DECAYS,
    LENGTHS,
    MISFITS,
    PACKED,
    TOLERANCE,
    assert_same,
    erasing,
    inputs,
    results,
)
from .test_selective_scan import READ_OUTS
from .test_selective_scan import inputs as scan_inputs
from .test_value_decay_recurrence import inputs as value_inputs

Op = Callable[..., Any]
GATES: dict[Op, tuple[str, ...]] = {  # the kinds of decays that are tested; the last is the most general
    kernels.linear_recurrence: ("none", "constant", "head", "channel"),
    kernels.delta_rule: ("none", "constant", "head"),
}


class Case(NamedTuple):
    """An op and a kind of call; one parameter, so that `pairwise` keeps both together.

    Attributes:
        op: The op.
        kind: The kind of decay; of the scan, what reads its states.
        make: Makes arguments of a number of tokens.
        options: Further arguments.
    """

    op: Op
    kind: str
    make: Callable[..., dict[str, Tensor]]
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.op.__name__}-{self.kind}"

    def call(self, a: dict[str, Tensor], **more: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs and the final state."""
        return self.op(**{**a, **more}, **self.options, return_state=True)

    def results(self, a: dict[str, Tensor], backend: str = "torch", **more: Any) -> dict[str, Tensor]:
        """The outputs, the final state, and all gradients."""
        return results(self.op, a, backend=backend, **self.options, **more)


def cut(a: dict[str, Tensor], i: int, j: int) -> dict[str, Tensor]:
    """The arguments of some tokens, each of one row or several, without a state."""
    tokens = next(iter(a.values())).shape[1]
    kept = {name: x for name, x in a.items() if name not in ("initial_state", "cu_seqlens")}
    rows = {name: x.shape[1] // tokens if x.dim() > 2 and x.shape[1] % tokens == 0 else 0 for name, x in kept.items()}
    return {name: x[:, rows[name] * i : rows[name] * j] if rows[name] else x for name, x in kept.items()}


def matrix(op: Op, gate: str, **options: Any) -> Case:
    """A case with subheads, shared keys and V ≠ K at once: what is mixed up in one of them shows."""
    return Case(op, gate, partial(inputs, gate=gate, R=2, E=2, **options), {"subheads": 2})


MATRICES = [matrix(op, gate) for op, gates in GATES.items() for gate in gates]
OTHERS = [
    *(Case(kernels.selective_scan, c, partial(scan_inputs, c=c), {}) for c in READ_OUTS),
    *(Case(kernels.selective_scan, f"{c}, no rate", partial(scan_inputs, c=c, rate=False), {}) for c in READ_OUTS),
    Case(kernels.value_decay_recurrence, "value", value_inputs, {}),
]
GENERAL = [
    Case(
        kernels.delta_rule,
        f"{gate}, {steps} steps",
        partial(erasing, gate=gate, steps=steps),
        {"steps": steps, "read_before": True},
    )
    for gate in ("head", "channel")
    for steps in (1, 2)
]
NO_BETA = [matrix(kernels.linear_recurrence, gate, beta=None) for gate in GATES[kernels.linear_recurrence]]
each_case = pytest.mark.parametrize("case", [*MATRICES, *OTHERS], ids=str)
each_matrix = pytest.mark.parametrize("case", MATRICES, ids=str)
each_op = pytest.mark.parametrize("op", GATES, ids=lambda op: op.__name__)


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@each_matrix
@pytest.mark.parametrize("length", LENGTHS)
def test_backends_agree(length: int, case: Case, dtype: torch.dtype):
    a = case.make(length, decay="mixed", dtype=dtype)
    assert_same(case.results(a), case.results(a, "reference"))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("case", [case for case in MATRICES if case.kind != "none"], ids=str)
def test_any_decay(case: Case, decay: str, dtype: torch.dtype, request: pytest.FixtureRequest):
    if (str(case), decay, dtype) == ("linear_recurrence-constant", "mixed", torch.float32):
        reason = "the gradient of a constant decay sums terms of either sign: error 4e-5 of its norm, allowed 1e-5"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=False))
    # 131 tokens: two full chunks and a ragged one
    a = inputs(131, gate=case.kind, decay=decay, dtype=dtype)
    assert_same(results(case.op, a), results(case.op, a, backend="reference"), TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("case", [*MATRICES, *NO_BETA, *OTHERS, *GENERAL], ids=str)
def test_packed_documents(case: Case, state: bool):
    a = case.make(200, decay="mixed", documents=PACKED, state=state)
    actual = case.results(a)
    assert_same(actual, case.results(a, "reference"))
    # … and each document alone gives the same
    for n, (i, j) in enumerate(pairwise(PACKED)):
        first = a["initial_state"][n : n + 1] if state else torch.zeros_like(actual["state"][n : n + 1])
        if i == j:
            assert torch.equal(actual["state"][n : n + 1], first)
            continue
        o, S = case.call(cut(a, i, j), initial_state=first)
        torch.testing.assert_close(actual["o"][:, i:j], o)
        torch.testing.assert_close(actual["state"][n : n + 1], S)


@each_case
def test_documents_of_whole_chunks(case: Case):
    # no padding anywhere is a path of its own
    a = case.make(192, documents=[0, 64, 192])
    assert_same(case.results(a), case.results(a, "reference"))


@each_case
def test_gradient_through_the_state_alone(case: Case):
    a = case.make(70)
    actual = case.results(a, through=("state",))
    assert_same(actual, case.results(a, "reference", through=("state",)))
    reading = "c" if case.op is kernels.selective_scan else "q"
    assert all(bool(actual[f"gradient of {name}"].any()) == (name != reading) for name in a)


@pytest.mark.parametrize("case", [*MATRICES, *OTHERS[:-1]], ids=str)
def test_bf16_inputs(case: Case):
    # gates and states stay in fp32, as mixers make them
    a = case.make(130, decay="mixed", dtype=torch.float32)
    a = {name: x.bfloat16() if name in "qkvxbc" else x for name, x in a.items()}
    actual, expected = case.results(a), case.results(a, "reference")
    assert (actual["o"].dtype, actual["state"].dtype) == (torch.bfloat16, torch.float32)
    assert_same({"state": actual["state"]}, {"state": expected["state"]})
    # both compute in fp32: what differs is a last bit of bf16 here and there
    assert_same(actual, expected, tolerance=1e-3)


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", ["reference", "torch"])
@each_case
@pytest.mark.parametrize("bounds", [[0, 64, 130], [0, 1, 66, 67, 130], list(range(131))])
def test_whole_is_pieces(bounds: list[int], case: Case, backend: str):
    a = case.make(130)
    with kernels.backend(backend):
        whole, final = case.call(a)
        state, outputs = a["initial_state"], []
        for i, j in pairwise(bounds):
            o, state = case.call(cut(a, i, j), initial_state=state)
            outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    torch.testing.assert_close(state, final)


@each_case
@pytest.mark.parametrize("length", [1, 70])
def test_autocast_changes_nothing(length: int, case: Case):
    a = case.make(length, dtype=torch.float32)
    expected = case.call(a)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, case.call(a), expected))


@each_matrix
def test_shared_keys_are_repeated_keys(case: Case):
    G, R, E = 2, 3, 2
    a = inputs(70, gate=case.kind, G=G, R=R, E=E)
    repeated = dict(a)
    for name in "qk":
        repeated[name] = a[name].unflatten(2, (G, E)).repeat_interleave(R, 2).flatten(2, 3)
    actual, expected = results(case.op, a, subheads=E), results(case.op, repeated, subheads=E)
    for name in "qk":
        gradient = expected[f"gradient of {name}"].unflatten(2, (G, R, E)).sum(3).flatten(2, 3)
        expected[f"gradient of {name}"] = gradient
    assert_same(actual, expected)


@each_matrix
def test_subheads_sum_their_outputs(case: Case):
    E, a = 3, inputs(70, gate=case.kind, G=2, R=2, E=3)
    total = 0
    for e in range(E):
        part = {"q": a["q"][:, :, e::E], "k": a["k"][:, :, e::E], "v": a["v"], "beta": a["beta"][..., e::E]}
        part["initial_state"] = a["initial_state"][:, e::E]
        if case.kind != "none":
            part["log_decay"] = a["log_decay"][..., e::E, :] if case.kind == "channel" else a["log_decay"][..., e::E]
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


@pytest.mark.parametrize(("name", "change"), [*MISFITS, ("log_decay", lambda x: x[..., None].expand(-1, -1, -1, 5))])
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


@each_case
def test_no_token_is_an_error(case: Case):
    a = case.make(3, state=False)
    with pytest.raises(ValueError, match=r"^[qx]: .*(at least one token|T ≥ 1)"):
        case.op(**cut(a, 0, 0))


@pytest.mark.parametrize("bounds", [*BAD_BOUNDARIES, "on another device"], ids=str)
@each_case
def test_boundaries_that_do_not_fit(case: Case, bounds: list | str):
    a = case.make(10, B=1, state=False)
    wrong = torch.tensor([0, 10], device="meta") if isinstance(bounds, str) else torch.tensor(bounds)
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        case.op(**a, **case.options, cu_seqlens=wrong)


@each_case
def test_a_state_per_document(case: Case):
    a = case.make(10, documents=[0, 4, 10])
    a["initial_state"] = a["initial_state"][:1]
    with pytest.raises(ValueError, match=r"^initial_state: "):
        case.op(**a, **case.options)
