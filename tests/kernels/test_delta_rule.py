import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import kernels

from .recurrences import BAD_BOUNDARIES, DECAYS, LENGTHS, MISFITS, PACKED, TOLERANCE, assert_same, inputs, results

run = partial(results, kernels.delta_rule)
GATES = ("none", "constant", "head")


def product_of_matrices(q, k, v, beta, log_decay, initial_state, subheads: int, scale: float) -> tuple[Tensor, Tensor]:
    """S_t = Σ_s (A_t … A_{s+1}) β_s k_s v_sᵀ + (A_t … A_1) S_0 with A_r = exp(g_r)(I − β_r k_r k_rᵀ), written out."""
    B, T, H, _ = v.shape
    R, eye = H // (k.shape[2] // subheads), torch.eye(k.shape[3], dtype=k.dtype)
    o, final = torch.zeros_like(v), torch.zeros_like(initial_state)
    for b, h, e in [(b, h, e) for b in range(B) for h in range(H) for e in range(subheads)]:
        n, key = h * subheads + e, (h // R) * subheads + e
        ks, betas = k[b, :, key], beta[b, :, n]
        A = [log_decay[b, t, n].exp() * (eye - betas[t] * torch.outer(ks[t], ks[t])) for t in range(T)]
        for t in range(T):
            S = torch.linalg.multi_dot([eye, *A[t::-1], initial_state[b, n]])
            for s in range(t + 1):
                written = betas[s] * torch.outer(ks[s], v[b, s, h])
                S = S + torch.linalg.multi_dot([eye, *A[t:s:-1], written])
            o[b, t, h] += scale * q[b, t, key] @ S
        final[b, n] = S
    return o, final


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_against_the_product_of_matrices(backend: str):
    # an independent computation: transitions as explicit matrices
    a = inputs(5, G=2, R=2, E=3, K=4, V=3)
    with kernels.backend(backend):
        o, state = kernels.delta_rule(**a, subheads=3, scale=0.7, return_state=True)
    expected_o, expected_state = product_of_matrices(**a, subheads=3, scale=0.7)
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
@pytest.mark.parametrize("gate", ["constant", "head"])
def test_any_decay(gate: str, decay: str, dtype: torch.dtype):
    # 131 tokens: two full chunks and a ragged one
    a = inputs(131, gate=gate, decay=decay, dtype=dtype)
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("beta", [0, 1, 2])
@pytest.mark.parametrize("gate", GATES)
def test_beta_at_its_ends(gate: str, beta: float, correlated: bool, dtype: torch.dtype):
    # at 1 a key's answer is replaced, at 2 it is reflected; correlated keys make the triangular system hard
    a = inputs(200, gate=gate, beta=beta, R=3, correlated=correlated, dtype=dtype)
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gate", GATES)
def test_correlated_keys(gate: str, dtype: torch.dtype):
    a = inputs(200, gate=gate, correlated=True, K=16, E=2, dtype=dtype)
    cosines = a["k"][0, :, 0] @ a["k"][0, :, 0].T
    assert 0.5 < cosines.mean() < 0.7
    assert_same(run(a, subheads=2), run(a, subheads=2, backend="reference"))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("gate", GATES)
def test_one_key_repeated(gate: str, dtype: torch.dtype):
    # the hardest system of all: with β = 1 only the latest value is remembered under the key
    a = inputs(200, gate=gate, beta=1, dtype=dtype)
    a["k"] = a["k"][:, :1].expand_as(a["k"]).contiguous()
    found = run(a)
    assert_same(found, run(a, backend="reference"))
    answer = (a["k"][:, -1, :, None] @ found["state"])[:, :, 0]
    torch.testing.assert_close(answer, a["v"][:, -1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_written_value_is_read_back(backend: str):
    # orthogonal keys and β = 1 store each value exactly
    T = K = 8
    k = torch.eye(K)[torch.randperm(K)].view(1, T, 1, K)
    v, beta = torch.randn(1, T, 1, 5), torch.ones(1, T, 1)
    with kernels.backend(backend):
        o, state = kernels.delta_rule(k, k, v, beta, scale=1.0, return_state=True)
    torch.testing.assert_close(o, v)
    torch.testing.assert_close((k[0, :, 0] @ state[0, 0]), v[0, :, 0])


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("gate", GATES)
def test_packed_documents(gate: str, state: bool):
    a = inputs(200, gate=gate, decay="mixed", G=1, R=2, E=2, documents=PACKED, state=state)
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
        o, S = kernels.delta_rule(**{**alone, "initial_state": first}, subheads=2, return_state=True)
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
        whole, final = kernels.delta_rule(**a, subheads=2, return_state=True)
        state, outputs = a.pop("initial_state"), []
        for i, j in pairwise(bounds):
            piece = {name: x if x.dim() == 1 else x[:, i:j] for name, x in a.items()}
            o, state = kernels.delta_rule(**piece, initial_state=state, subheads=2, return_state=True)
            outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    torch.testing.assert_close(state, final)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("length", [1, 70])
def test_autocast_changes_nothing(length: int, gate: str):
    a = inputs(length, gate=gate, dtype=torch.float32)
    o, state = kernels.delta_rule(**a, return_state=True)
    with torch.autocast("cpu", torch.bfloat16):
        cast_o, cast_state = kernels.delta_rule(**a, return_state=True)
    assert torch.equal(cast_o, o)
    assert torch.equal(cast_state, state)


def test_subheads_are_not_one_long_head():
    """Other than for the linear recurrence: a long key's answer mixes all subheads."""
    E, a = 3, inputs(70, gate="none", E=3, state=False)
    o, _ = kernels.delta_rule(**a, subheads=E, scale=0.3)
    q, k = (a[name].unflatten(2, (2, E)).flatten(3) for name in "qk")
    long, _ = kernels.delta_rule(q, k, a["v"], a["beta"][..., ::E], scale=0.3)
    assert o.shape == long.shape
    assert not torch.allclose(long, o, rtol=0.1)
    # with a single token there is no answer to mix, and both are the same
    one = {name: x[:, :1] for name, x in a.items()}
    one["beta"] = torch.ones_like(one["beta"])
    o, _ = kernels.delta_rule(**one, subheads=E, scale=0.3)
    torch.testing.assert_close(
        kernels.delta_rule(q[:, :1], k[:, :1], a["v"][:, :1], one["beta"][..., ::E], scale=0.3)[0], o
    )


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
            part["log_decay"] = a["log_decay"][..., e::E]
        total = total + kernels.delta_rule(**part)[0]
    torch.testing.assert_close(kernels.delta_rule(**a, subheads=E)[0], total)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("length", [1, 70])
def test_views_of_one_projection(length: int, backend: str):
    widths = {"q": 2 * 8, "v": 4 * 6, "k": 2 * 8, "log_decay": 4, "beta": 4}
    fused = torch.rand(2, length, sum(widths.values()), dtype=torch.float64) / 4
    parts = dict(zip(widths, fused.split(list(widths.values()), -1), strict=True))
    views = {name: parts[name].unflatten(-1, (2 if name in "qk" else 4, -1)) for name in "qkv"}
    views["log_decay"], views["beta"] = -parts["log_decay"], parts["beta"]
    assert not views["q"].is_contiguous() or length == 1
    copies = {name: x.contiguous() for name, x in views.items()}
    assert_same(run(views, backend=backend), run(copies, backend=backend))


def test_scale_defaults_to_the_key_size_and_state_is_only_given_on_request():
    a = inputs(10, K=16)
    o, state = kernels.delta_rule(**a)
    assert state is None
    torch.testing.assert_close(kernels.delta_rule(**a, scale=1.0)[0] / math.sqrt(16), o)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("length", [1, 70])
def test_arguments_stay_as_they_were(length: int, backend: str):
    a = inputs(length, E=2)
    before = {name: x.clone() for name, x in a.items()}
    with kernels.backend(backend):
        kernels.delta_rule(**a, subheads=2, return_state=True)
    assert all(torch.equal(a[name], before[name]) for name in a)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *MISFITS,
        ("log_decay", lambda x: x[..., None].expand(-1, -1, -1, 7)),  # for seven of eight key channels
        ("beta", lambda x: None),
    ],
)
def test_errors_name_the_argument(name: str, change):
    a = {**inputs(10, R=2), "subheads": 1}
    kernels.delta_rule(**a)  # right as they are
    a[name] = change(a.get(name))
    with pytest.raises(ValueError, match=rf"^{name}: "):
        kernels.delta_rule(**a)


@pytest.mark.parametrize("bounds", BAD_BOUNDARIES)
def test_boundaries_that_do_not_fit(bounds: list):
    a = inputs(10, B=1, state=False)
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        kernels.delta_rule(**a, cu_seqlens=torch.tensor(bounds))
