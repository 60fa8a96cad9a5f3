"""The recurrence with a decay per value channel, against a loop and against `linear_recurrence`, roles exchanged."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

import kernels
from kernels.core.chunking import REACH

from .recurrences import DECAYS, LENGTHS, TOLERANCE, assert_same, results, shorter

run = partial(results, kernels.value_decay_recurrence)


def inputs(
    T: int,
    *,
    decay: str = "mild",
    B: int = 2,
    H: int = 3,
    K: int = 8,
    V: int = 6,
    state: bool = True,
    documents: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Arguments of a call; `decay` is a key of DECAYS."""
    B = B if documents is None else 1
    q, k, v = (torch.randn(B, T, H, size) for size in (K, K, V))
    a = {"q": q, "k": k, "v": v, "log_decay": DECAYS[decay](torch.rand(v.shape))}
    if state:
        a["initial_state"] = torch.randn(B if documents is None else len(documents) - 1, H, V, K)
    a = {name: x.to(dtype) for name, x in a.items()}
    if documents is not None:
        a["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
    return a


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_against_the_quadratic_form(backend: str):
    a = inputs(7)
    with kernels.backend(backend):
        o, state = kernels.value_decay_recurrence(**a, scale=0.7, return_state=True)
    q, k, v, g, first = a.values()
    for t in range(7):
        S = g[:, : t + 1].sum(1).exp()[..., None] * first
        for s in range(t + 1):
            S = S + (g[:, s + 1 : t + 1].sum(1).exp() * v[:, s])[..., None] * k[:, s, :, None]
        torch.testing.assert_close(o[:, t], 0.7 * (S @ q[:, t, ..., None])[..., 0])
    torch.testing.assert_close(state, S)


def test_it_is_the_gradient_of_the_other_recurrence():
    """With q as the gradient of the output, k as values and v as keys, it is the gradient of the queries."""
    a = inputs(130, decay="mixed")
    queries = torch.zeros_like(a["v"], requires_grad=True)
    first = a["initial_state"]
    o, _ = kernels.linear_recurrence(queries, a["v"], a["k"], a["log_decay"], scale=0.3, initial_state=first)
    (expected,) = torch.autograd.grad(o, queries, a["q"])
    torch.testing.assert_close(kernels.value_decay_recurrence(**a, scale=0.3)[0], expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", LENGTHS)
def test_backends_agree(length: int, decay: str, dtype: torch.dtype):
    a = inputs(length, decay=decay, dtype=dtype)
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("total", [0.99, 1.01, 1.99, 2.01, 5.0])  # over a chunk; it has a reach to either side
def test_decays_around_what_one_reference_point_takes(total: float, at_once: bool):
    a = inputs(130, dtype=torch.float32)
    a["log_decay"] = torch.full_like(a["log_decay"], -REACH * math.log(2) * total / 64)
    if at_once:
        a["log_decay"] = torch.where(torch.arange(130)[:, None, None] % 64 == 20, 64 * a["log_decay"], 0)
    assert_same(run(a), run(a, backend="reference"))


def test_a_reset_erases_channels_and_passes_no_gradient():
    a = inputs(100, dtype=torch.float32)
    a["log_decay"][:, [30, 64], :, 2:] = -math.inf
    actual = run(a)
    expected = run(a, backend="reference")
    for name in actual.keys() - {"gradient of log_decay"}:  # that of the loop is not finite at a reset
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-4, atol=1e-5)
    assert actual["gradient of log_decay"].isfinite().all()
    assert not actual["gradient of log_decay"][:, :31, :, 2:][:, 30].any()


def test_outputs_in_bf16_are_scores_in_fp32():
    a = inputs(130, dtype=torch.float32)
    a.update({name: a[name].bfloat16() for name in "qkv"})
    actual = run(a)
    assert actual["o"].dtype == actual["state"].dtype == torch.float32
    assert_same({n: actual[n] for n in ("o", "state")}, {n: run(a, backend="reference")[n] for n in ("o", "state")})


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_step_may_overwrite_the_state(backend: str):
    a = inputs(1, dtype=torch.float32 if backend == "triton" else torch.float64)
    expected = kernels.value_decay_recurrence(**a, return_state=True)
    state = a["initial_state"]
    with kernels.backend(backend):
        kept = state.clone()
        torch.testing.assert_close(kernels.value_decay_recurrence(**a, return_state=True), expected)
        assert torch.equal(state, kept)
        actual = kernels.value_decay_recurrence(**a, return_state=True, consume_state=True)
        assert actual[1].data_ptr() == state.data_ptr()
        torch.testing.assert_close(actual, expected)
        a["initial_state"], q = torch.randn_like(state), a.pop("q").requires_grad_()
        kept = a["initial_state"].clone()
        kernels.value_decay_recurrence(q, **a, return_state=True, consume_state=True)
    assert torch.equal(a["initial_state"], kept)


@pytest.mark.parametrize(("K", "V"), [(8, 6), (33, 70), (130, 16)])
@torch.no_grad()
def test_a_step_in_one_launch(K: int, V: int):
    a = inputs(1, K=K, V=V, dtype=torch.float32)
    a["log_decay"][0, 0, 0, 0] = -torch.inf
    wide = torch.cat([a["v"], a["v"]], -1)[..., V // 2 : V // 2 + V]  # with gaps between heads
    a["v"] = wide
    results = []
    for backend in ("triton", "reference"):
        with kernels.backend(backend):
            results.append(kernels.value_decay_recurrence(**a, return_state=True))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("q", lambda x: x[0]),
        ("q", lambda x: x.long()),
        ("k", shorter(1)),
        ("k", lambda x: x.float()),
        ("v", shorter(2)),
        ("v", lambda x: x[..., 0]),
        ("v", lambda x: x.float()),
        ("v", lambda x: x.to("meta")),
        ("k", lambda x: x.mT.contiguous().mT),
        ("v", lambda x: x.mT.contiguous().mT),
        ("log_decay", shorter(3)),
        ("log_decay", lambda x: x[..., 0]),
        ("log_decay", lambda x: -x),
        ("initial_state", shorter(0)),
        ("initial_state", lambda x: x.mT),
        ("cu_seqlens", lambda x: torch.tensor([0, 10])),  # for two rows
    ],
)
def test_misfits_begin_with_their_name(name: str, wrong):
    a = inputs(10)
    a[name] = wrong(a.get(name))
    with pytest.raises(ValueError, match=f"^{name}: "):
        kernels.value_decay_recurrence(**a)
