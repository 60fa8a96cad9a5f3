import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import kernels
from kernels.core.chunking import REACH

from .recurrences import BAD_BOUNDARIES, DECAYS, LENGTHS, MISFITS, PACKED, TOLERANCE, assert_same, inputs, results

run = partial(results, kernels.linear_recurrence)
GATES = ("none", "constant", "head", "channel")


def quadratic_form(q, k, v, log_decay, beta, initial_state, subheads: int, scale: float) -> tuple[Tensor, Tensor]:
    """o_t = scale · Σ_{s≤t} β_s (Σ_c q_tc k_sc Π_{s<r≤t} a_rc) v_s, recurrence by recurrence, gates per channel."""
    T, H = v.shape[1:3]
    R = H // (k.shape[2] // subheads)
    o, final = torch.zeros_like(v), torch.zeros_like(initial_state)
    for h in range(H):
        for e in range(subheads):
            n, key = h * subheads + e, (h // R) * subheads + e
            a = log_decay[:, :, n].exp()  # [B,T,K]
            for t in range(T):
                kept = a[:, : t + 1].prod(1)
                S = kept[..., None] * initial_state[:, n]
                for s in range(t + 1):
                    kept = a[:, s + 1 : t + 1].prod(1)
                    S = S + torch.einsum("bk,bv->bkv", beta[:, s, n, None] * kept * k[:, s, key], v[:, s, h])
                o[:, t, h] += scale * torch.einsum("bk,bkv->bv", q[:, t, key], S)
            final[:, n] = S
    return o, final


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_against_the_quadratic_form(backend: str):
    # an independent computation: no loop over a state, each pair of tokens by itself
    a = inputs(5, gate="channel", decay="mild", G=2, R=2, E=3, K=4, V=3)
    with kernels.backend(backend):
        o, state = kernels.linear_recurrence(**a, subheads=3, scale=0.7, return_state=True)
    expected_o, expected_state = quadratic_form(**a, subheads=3, scale=0.7)
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(state, expected_state)


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("length", LENGTHS)
def test_backends_agree(length: int, gate: str, dtype: torch.dtype):
    # subheads, shared keys, V ≠ K and a first state at once: what is mixed up in one of them shows
    a = inputs(length, gate=gate, decay="mixed", G=2, R=2, E=3, dtype=dtype)
    assert_same(run(a, subheads=3), run(a, subheads=3, backend="reference"))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("gate", ["constant", "head", "channel"])
def test_any_decay(gate: str, decay: str, dtype: torch.dtype):
    # 131 tokens: two full chunks and a ragged one
    a = inputs(131, gate=gate, decay=decay, dtype=dtype)
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("total", [0.99, 1.01, 1.99, 2.01, 5.0])
def test_decays_around_what_shared_scores_take(total: float, at_once: bool, dtype: torch.dtype):
    a = inputs(130, R=3, dtype=dtype)
    a["log_decay"] = torch.full_like(a["log_decay"], -REACH * math.log(2) * total / 64)
    if at_once:
        a["log_decay"] = torch.where(torch.arange(130)[:, None] % 64 == 20, 64 * a["log_decay"], 0)
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("total", [0.99, 1.01, 1.99, 2.01, 5.0])  # over a chunk; it has a reach to either side
def test_decays_around_what_one_reference_point_takes(total: float, at_once: bool):
    a = inputs(130, gate="channel", dtype=torch.float32)
    a["log_decay"] = torch.full_like(a["log_decay"], -REACH * math.log(2) * total / 64)
    if at_once:
        a["log_decay"] = torch.where(torch.arange(130)[:, None, None] % 64 == 20, 64 * a["log_decay"], 0)
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.parametrize("beta", [None, 0, 1])
@pytest.mark.parametrize("gate", GATES)
def test_beta_at_its_ends(gate: str, beta: float | None):
    a = inputs(65, gate=gate, beta=beta, R=3, dtype=torch.float32)
    found = run(a)
    assert_same(found, run(a, backend="reference"))
    if beta == 1:
        del a["beta"]
        expected = run(a)
        assert_same({name: found[name] for name in expected}, expected)


@pytest.mark.slow
@pytest.mark.parametrize("beta", ["random", None])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("gate", GATES)
def test_packed_documents(gate: str, state: bool, beta: str | None):
    a = inputs(200, gate=gate, decay="mixed", beta=beta, G=1, R=2, E=2, documents=PACKED, state=state)
    found = run(a, subheads=2)
    assert_same(found, run(a, subheads=2, backend="reference"))
    # … and each document alone gives the same
    del a["cu_seqlens"]
    for n, (i, j) in enumerate(pairwise(PACKED)):
        first = a["initial_state"][n : n + 1] if state else torch.zeros(1, 4, 8, 6, dtype=torch.float64)
        if i == j:
            assert torch.equal(found["state"][n : n + 1], first)
            continue
        alone = {name: x if x.dim() == 1 else x[:, i:j] for name, x in a.items()}
        o, S = kernels.linear_recurrence(**{**alone, "initial_state": first}, subheads=2, return_state=True)
        torch.testing.assert_close(found["o"][:, i:j], o)
        torch.testing.assert_close(found["state"][n : n + 1], S)


@pytest.mark.parametrize("gate", GATES)
def test_documents_of_whole_chunks(gate: str):
    # no padding anywhere is a path of its own
    a = inputs(192, gate=gate, G=1, R=2, documents=[0, 64, 192])
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.parametrize("gate", GATES)
def test_gradient_through_the_state_alone(gate: str):
    a = inputs(70, gate=gate, E=2)
    found = run(a, subheads=2, through=("state",))
    assert_same(found, run(a, subheads=2, through=("state",), backend="reference"))
    assert not found["gradient of q"].any()
    assert all(found[f"gradient of {name}"].any() for name in a if name != "q")


@pytest.mark.parametrize("gate", GATES)
def test_bf16_inputs(gate: str):
    # gates and states stay in fp32, as mixers make them
    a = inputs(130, gate=gate, decay="mixed", R=2, E=2, dtype=torch.float32)
    a.update({name: a[name].bfloat16() for name in "qkv"})
    found, expected = run(a, subheads=2), run(a, subheads=2, backend="reference")
    assert (found["o"].dtype, found["state"].dtype) == (torch.bfloat16, torch.float32)
    assert_same({"state": found["state"]}, {"state": expected["state"]})
    # both compute in fp32: what differs is a last bit of bf16 here and there
    assert_same(found, expected, tolerance=1e-3)


@pytest.mark.pairwise
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bounds", [[0, 64, 130], [0, 1, 66, 67, 130], list(range(131))])
def test_whole_is_pieces(bounds: list[int], gate: str, backend: str):
    a = inputs(130, gate=gate, R=2, E=2)
    with kernels.backend(backend):
        whole, final = kernels.linear_recurrence(**a, subheads=2, return_state=True)
        state, outputs = a.pop("initial_state"), []
        for i, j in pairwise(bounds):
            piece = {name: x if x.dim() == 1 else x[:, i:j] for name, x in a.items()}
            o, state = kernels.linear_recurrence(**piece, initial_state=state, subheads=2, return_state=True)
            outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("length", [1, 70])
def test_autocast_changes_nothing(length: int, gate: str):
    a = inputs(length, gate=gate, dtype=torch.float32)
    o, state = kernels.linear_recurrence(**a, return_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        cast_o, cast_state = kernels.linear_recurrence(**a, return_state=True)
    assert torch.equal(cast_o, o)
    assert torch.equal(cast_state, state)


@pytest.mark.parametrize("gate", ["none", "constant", "head"])
def test_subheads_are_one_long_head(gate: str):
    """The identity of state expansion: E subheads that share a gate are one head with key size E·K, given a scale."""
    E, a = 3, inputs(70, gate=gate, G=2, R=2, E=3)
    long = {
        "q": a["q"].unflatten(2, (2, E)).flatten(3),
        "k": a["k"].unflatten(2, (2, E)).flatten(3),
        "v": a["v"],
        "beta": a["beta"][..., ::E],
        "initial_state": a["initial_state"].unflatten(1, (4, E)).flatten(2, 3),
    }
    shared = {**a, "beta": long["beta"].repeat_interleave(E, -1)}
    if gate != "none":
        long["log_decay"] = a["log_decay"][..., ::E]
        shared["log_decay"] = long["log_decay"].repeat_interleave(E, -1)
    o, _ = kernels.linear_recurrence(**shared, subheads=E, scale=0.3)
    torch.testing.assert_close(kernels.linear_recurrence(**long, scale=0.3)[0], o)
    if gate == "head":  # a gate of its own for each subhead is another function
        assert not torch.allclose(kernels.linear_recurrence(**a, subheads=E, scale=0.3)[0], o)


@pytest.mark.parametrize("gate", GATES)
def test_shared_keys_are_repeated_keys(gate: str):
    G, R, E = 2, 3, 2
    a = inputs(70, gate=gate, G=G, R=R, E=E)
    repeated = dict(a)
    for name in "qk":
        repeated[name] = a[name].unflatten(2, (G, E)).repeat_interleave(R, 2).flatten(2, 3)
    found, expected = run(a, subheads=E), run(repeated, subheads=E)
    for name in "qk":
        gradient = expected[f"gradient of {name}"].unflatten(2, (G, R, E)).sum(3).flatten(2, 3)
        expected[f"gradient of {name}"] = gradient
    assert_same(found, expected)


@pytest.mark.parametrize("gate", GATES)
def test_subheads_sum_their_outputs(gate: str):
    E, a = 3, inputs(70, gate=gate, G=2, R=2, E=3)
    total = 0
    for e in range(E):
        part = {"q": a["q"][:, :, e::E], "k": a["k"][:, :, e::E], "v": a["v"], "beta": a["beta"][..., e::E]}
        part["initial_state"] = a["initial_state"][:, e::E]
        if gate != "none":
            part["log_decay"] = a["log_decay"][..., e::E, :] if gate == "channel" else a["log_decay"][..., e::E]
        total = total + kernels.linear_recurrence(**part)[0]
    torch.testing.assert_close(kernels.linear_recurrence(**a, subheads=E)[0], total)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("length", [1, 70])
def test_views_of_one_projection(length: int, backend: str):
    widths = {"q": 2 * 8, "k": 2 * 8, "v": 4 * 6, "log_decay": 4, "beta": 4}
    fused = torch.randn(2, length, sum(widths.values()), dtype=torch.float64)
    parts = dict(zip(widths, fused.split(list(widths.values()), -1), strict=True))
    views = {name: x.unflatten(-1, (2 if name in "qk" else 4, -1)) for name, x in parts.items()}
    views["log_decay"], views["beta"] = -parts["log_decay"].abs(), parts["beta"]
    assert not views["q"].is_contiguous() or length == 1
    copies = {name: x.contiguous() for name, x in views.items()}
    assert_same(run(views, backend=backend), run(copies, backend=backend))


def test_scale_defaults_to_the_key_size_and_state_is_only_given_on_request():
    a = inputs(10, K=16)
    o, state = kernels.linear_recurrence(**a)
    assert state is None
    torch.testing.assert_close(kernels.linear_recurrence(**a, scale=1.0)[0] / math.sqrt(16), o)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("length", [1, 70])
def test_arguments_stay_as_they_were(length: int, backend: str):
    a = inputs(length, gate="channel", E=2)
    before = {name: x.clone() for name, x in a.items()}
    with kernels.backend(backend):
        kernels.linear_recurrence(**a, subheads=2, return_state=True)
    assert all(torch.equal(a[name], before[name]) for name in a)


@pytest.mark.parametrize(
    ("name", "change"),
    [*MISFITS, ("log_decay", lambda x: x[..., None].expand(-1, -1, -1, 5))],
)
def test_errors_name_the_argument(name: str, change):
    a = {**inputs(10, R=2), "subheads": 1}
    kernels.linear_recurrence(**a)  # right as they are
    a[name] = change(a.get(name))
    with pytest.raises(ValueError, match=rf"^{name}: "):
        kernels.linear_recurrence(**a)


def test_no_token_is_an_error():
    a = inputs(3, state=False)
    with pytest.raises(ValueError, match=r"^q: .* at least one token"):
        kernels.linear_recurrence(**{name: x[:, :0] for name, x in a.items()})


@pytest.mark.parametrize("bounds", BAD_BOUNDARIES)
def test_boundaries_that_do_not_fit(bounds: list):
    a = inputs(10, B=1, state=False)
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        kernels.linear_recurrence(**a, cu_seqlens=torch.tensor(bounds))


def test_boundaries_on_another_device():
    a = inputs(10, B=1, state=False)
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        kernels.linear_recurrence(**a, cu_seqlens=torch.tensor([0, 10], device="meta"))


def test_a_state_per_document():
    a = inputs(10, documents=[0, 4, 10])
    a["initial_state"] = a["initial_state"][:1]
    with pytest.raises(ValueError, match=r"^initial_state: "):
        kernels.linear_recurrence(**a)
