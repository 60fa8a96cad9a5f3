from functools import partial

import pytest
import torch
from torch import Tensor

import kernels

from .recurrences import TOLERANCE, assert_same, inputs, results

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
    actual = run(a)
    assert_same(actual, run(a, backend="reference"))
    answer = (a["k"][:, -1, :, None] @ actual["state"])[:, :, 0]
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


def test_beta_is_needed():
    a = inputs(10)
    del a["beta"]
    with pytest.raises(ValueError, match=r"^beta: "):
        kernels.delta_rule(**a)
