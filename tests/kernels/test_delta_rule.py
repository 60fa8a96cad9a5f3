"""The delta rule in PyTorch: β, erase keys of their own, decays per channel, reads before the decay, several steps."""

from functools import partial

import pytest
import torch
from torch import Tensor

import kernels

from .recurrences import DECAYS, FORMS, LENGTHS, TOLERANCE, assert_same, erasing, inputs, results

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


def loop_of_matrices(a: dict[str, Tensor], steps: int, *, read_before: bool) -> tuple[Tensor, Tensor]:
    """One key head per value head, no subheads: S_t = M_t S_{t−1} + N_t with explicit matrices."""
    q, k, v, erase, write = (a[name] for name in ("q", "k", "v", "erase", "erase_write"))
    (B, T, H, K), V = q.shape, v.shape[3]
    eye, o, final = torch.eye(K, dtype=q.dtype), q.new_zeros(B, T, H, V), torch.zeros_like(a["initial_state"])
    for b, h in [(b, h) for b in range(B) for h in range(H)]:
        S = a["initial_state"][b, h]
        for t in range(T):
            D = a["log_decay"][b, t, h].exp().diag()
            for i in range(t * steps, (t + 1) * steps):
                erased = torch.outer(write[b, i, h], erase[b, i, h])
                if i > t * steps:
                    D = eye
                S = (D - erased if read_before else (eye - erased) @ D) @ S + torch.outer(k[b, i, h], v[b, i, h])
            o[b, t, h] = K**-0.5 * q[b, t, h] @ S
        final[b, h] = S
    return o, final


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_erase_keys_against_a_loop_of_matrices(backend: str, steps: int, read_before: bool):
    a = erasing(5, form="two keys", steps=steps, gate="channel", K=4, V=3)
    with kernels.backend(backend):
        o, state = kernels.delta_rule(**a, steps=steps, read_before=read_before, return_state=True)
    expected_o, expected_state = loop_of_matrices(a, steps, read_before=read_before)
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(state, expected_state)


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", ["none", "constant", "head", "channel"])
@pytest.mark.parametrize("length", LENGTHS)
def test_backends_agree(length: int, gate: str, form: str, steps: int, read_before: bool, dtype: torch.dtype):
    # subheads, shared keys, V ≠ K and a first state at once: what is mixed up in one of them shows
    a = erasing(length, form=form, steps=steps, gate=gate, G=2, R=2, E=3, dtype=dtype)
    options = {"subheads": 3, "steps": steps, "read_before": read_before}
    assert_same(run(a, **options), run(a, **options, backend="reference"))


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("decay", [*DECAYS, "reset"])
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_any_decay(gate: str, decay: str, steps: int, read_before: bool):
    # 131 tokens: two full chunks and a ragged one
    a = erasing(131, steps=steps, gate=gate, decay="mild" if decay == "reset" else decay)
    if decay == "reset":
        a["log_decay"] = a["log_decay"].where(torch.rand(a["log_decay"].shape) > 0.1, -torch.inf)
    options = {"steps": steps, "read_before": read_before}
    assert_same(run(a, **options), run(a, **options, backend="reference"))


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("form", ["beta", "per channel", "both", "two keys"])
def test_strengths_are_factors_of_what_is_erased_and_written(form: str, backend: str):
    a = erasing(70, gate="channel", form=form)
    if form == "two keys":
        a["beta"] = torch.rand(a["erase"].shape[:3], dtype=torch.float64)
    strength = a["beta"] if form == "per channel" else a["beta"].unsqueeze(-1)
    b = {**a, "erase": strength * a.get("erase", a["k"])}
    if form != "per channel":
        b["v"] = strength * a["v"]
    del b["beta"]
    with kernels.backend(backend):
        expected, actual = kernels.delta_rule(**b)[0], kernels.delta_rule(**a)[0]
    torch.testing.assert_close(actual, expected)


def test_one_decay_in_all_channels():
    a = inputs(70, gate="head")
    wide = {**a, "log_decay": a["log_decay"].unsqueeze(-1).expand(-1, -1, -1, 8)}
    torch.testing.assert_close(kernels.delta_rule(**wide)[0], kernels.delta_rule(**a)[0])


def test_steps_are_tokens_that_are_not_read():
    a = erasing(30, steps=2, gate="channel")
    q, g = torch.zeros(2, 60, 2, 8, dtype=torch.float64), torch.zeros(2, 60, 2, 8, dtype=torch.float64)
    q[:, 1::2], g[:, ::2] = a["q"], a["log_decay"]
    expected = kernels.delta_rule(**{**a, "q": q, "log_decay": g})[0][:, 1::2]
    torch.testing.assert_close(kernels.delta_rule(**a, steps=2)[0], expected)


def test_the_erased_value_may_be_written_with_the_key():
    a = erasing(70, gate="channel")
    both = {**a, "erase_write": a["k"]}
    torch.testing.assert_close(kernels.delta_rule(**both)[0], kernels.delta_rule(**a)[0])


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_token_at_a_time_equals_all_at_once(form: str, steps: int, read_before: bool):
    a = erasing(9, form=form, steps=steps, gate="channel", R=2, E=2)
    options = {"steps": steps, "read_before": read_before, "subheads": 2, "return_state": True}
    whole, last = kernels.delta_rule(**a, **options)
    state, outputs = a.pop("initial_state"), []
    per_row = {name for name in a if name not in ("q", "log_decay")}
    for t in range(9):
        one = {name: x[:, steps * t : steps * (t + 1)] if name in per_row else x[:, t : t + 1] for name, x in a.items()}
        o, state = kernels.delta_rule(**one, initial_state=state, consume_state=t > 0, **options)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    torch.testing.assert_close(state, last)


def test_a_single_token_without_a_state_has_no_gradient_of_its_decay():
    for steps in (1, 2):
        a = erasing(1, steps=steps, gate="channel", state=False, dtype=torch.float32)
        assert not run(a, steps=steps, through=("o", "state"))["gradient of log_decay"].any()


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_compiled_without_a_graph_break(gate: str):
    a = erasing(70, gate=gate, decay="mixed")
    compiled = torch.compile(kernels.delta_rule, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**a)[0], kernels.delta_rule(**a)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"erase": torch.ones(2, 10, 2, 7)}, r"erase: expected \[2,10,2,8\], got shape \(2, 10, 2, 7\)"),
        ({"erase": torch.ones(2, 10, 2, 8, dtype=torch.int64)}, "erase: expected a floating dtype, got torch.int64"),
        ({"erase_write": torch.ones(2, 10, 2, 7)}, "erase_write: expected the shape of erase"),
        ({"erase_write": torch.ones(2, 10, 2, 8, dtype=torch.int64)}, "erase_write: is torch.int64, but k is"),
        ({"erase_write": torch.ones(2, 10, 2, 8), "v": torch.ones(2, 9, 2, 6)}, r"v: expected \[2,10,H,V\]"),
        ({"erase_write": torch.ones(2, 10, 2, 8), "subheads": 0}, "subheads: 0 does not divide"),
        ({"steps": 0}, "steps: must be at least 1, got 0"),
        ({"steps": 2}, r"v: expected \[2,20,H,V\] as q has it with steps=2, got shape \(2, 10, 2, 6\)"),
        ({"k": torch.ones(2, 9, 2, 8)}, "k: expected the shape of q"),
        ({"erase": None}, "beta: the delta rule needs beta or erase"),
        ({"erase": None, "beta": torch.ones(2, 10, 2, 7)}, r"beta: expected \[2,10,2\] or \[2,10,2,8\], got shape"),
        ({"beta": torch.ones(2, 10, 2, 8)}, "beta: one per channel makes erase keys of k, so that erase cannot"),
        (
            {"erase": None, "beta": torch.ones(2, 10, 2), "erase_write": torch.ones(2, 10, 2, 8)},
            "erase_write: needs erase",
        ),
    ],
)
def test_errors_of_erase_keys_name_the_argument(change: dict, message: str):
    a = {**erasing(10, gate="channel"), **change}
    with pytest.raises(ValueError, match=f"^{message}"):
        kernels.delta_rule(**a)
