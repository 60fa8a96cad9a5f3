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
def test_one_key_repeated(gate: str, dtype: torch.dtype):
    # the hardest system of all: with β = 1 only the latest value is remembered under the key
    a = inputs(200, gate=gate, beta=1, dtype=dtype)
    a["k"] = a["k"][:, :1].expand_as(a["k"]).contiguous()
    actual = run(a)
    assert_same(actual, run(a, backend="reference"))
    answer = (a["k"][:, -1, :, None] @ actual["state"])[:, :, 0]
    torch.testing.assert_close(answer, a["v"][:, -1], atol=1e-5, rtol=1e-5)


def test_beta_is_needed():
    a = inputs(10)
    del a["beta"]
    with pytest.raises(ValueError, match=r"^beta: "):
        kernels.delta_rule(**a)
