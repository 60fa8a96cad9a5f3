import math
from functools import partial

import pytest
import torch
from torch import Tensor

import kernels
from kernels.core.chunking import REACH

from .recurrences import TOLERANCE, assert_same, inputs, results

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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    "total", [0.99, 1.01, 1.99, 2.01, 5.0]
)  # over a chunk; a reference point reaches to both sides
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_decays_around_what_shared_scores_and_one_reference_point_take(
    gate: str, total: float, at_once: bool, dtype: torch.dtype
):
    a = inputs(130, gate=gate, R=3, dtype=dtype)
    a["log_decay"] = torch.full_like(a["log_decay"], -REACH * math.log(2) * total / 64)
    if at_once:
        first = torch.arange(130).view(130, *[1] * (a["log_decay"].dim() - 2)) % 64 == 20
        a["log_decay"] = torch.where(first, 64 * a["log_decay"], 0)
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.parametrize("beta", [None, 0, 1])
@pytest.mark.parametrize("gate", GATES)
def test_beta_at_its_ends(gate: str, beta: float | None):
    a = inputs(65, gate=gate, beta=beta, R=3, dtype=torch.float32)
    actual = run(a)
    assert_same(actual, run(a, backend="reference"))
    if beta == 1:
        del a["beta"]
        expected = run(a)
        assert_same({name: actual[name] for name in expected}, expected)


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
