from functools import partial

import pytest
import torch
from torch import Tensor

import kernels

from .recurrences import DECAYS, TOLERANCE, assert_same, results, shorter

run = partial(results, kernels.selective_scan)
LENGTHS = (1, 15, 16, 17, 63, 200)
READ_OUTS = ("each step", "constant", "ones")


def inputs(
    T: int,
    *,
    N: int = 3,
    c: str = "each step",
    rate: bool = True,
    b: bool = True,
    decay: str = "mixed",
    B: int = 2,
    D: int = 4,
    state: bool = True,
    skip: bool = False,
    documents: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Arguments of a scan; with `documents` of one row, and without `rate` of one state per channel."""
    B, N = B if documents is None else 1, N if rate else 1
    actual = {"x": torch.randn(B, T, D), "log_decay": DECAYS[decay](torch.rand(B, T, D))}
    if rate:
        actual["rate"] = 0.1 + torch.rand(D, N)
    if b:
        actual["b"] = torch.randn(B, T, N)
    if c != "ones":
        actual["c"] = torch.randn((B, T, N) if c == "each step" else (D, N))
    if skip:
        actual["skip"] = torch.randn(D)
    if state:
        actual["initial_state"] = torch.randn(B if documents is None else len(documents) - 1, D, N)
    actual = {name: x.to(dtype) for name, x in actual.items()}
    if documents is not None:
        actual["cu_seqlens"] = torch.tensor(documents, dtype=torch.int32)
    return actual


def matrix_form(x, log_decay, rate, b, c, initial_state) -> tuple[Tensor, Tensor]:
    """y = M x in each channel, M_ts = Σ_n c_tn (Π_{s<r≤t} a_rn) b_sn: each pair of tokens by itself, no loop over h."""
    B, T, D = x.shape
    y, final = torch.zeros_like(x), torch.zeros_like(initial_state)
    for d in range(D):
        a = (log_decay[:, :, d, None] * rate[d]).exp()  # [B,T,N]
        M = torch.zeros(B, T, T, dtype=x.dtype)
        for t in range(T):
            h = a[:, : t + 1].prod(1) * initial_state[:, d]
            for s in range(t + 1):
                kept = a[:, s + 1 : t + 1].prod(1) * b[:, s]
                M[:, t, s] = (c[:, t] * kept).sum(-1)
                h = h + kept * x[:, s, d, None]
            y[:, t, d] = (c[:, t] * a[:, : t + 1].prod(1) * initial_state[:, d]).sum(-1)
        y[:, :, d] += (M @ x[:, :, d, None]).squeeze(-1)
        final[:, d] = h
    return y, final


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_against_a_matrix(backend: str):
    a = inputs(6, decay="mild")
    with kernels.backend(backend):
        y, state = kernels.selective_scan(**a, return_state=True)
    expected_y, expected_state = matrix_form(**a)
    torch.testing.assert_close(y, expected_y)
    torch.testing.assert_close(state, expected_state)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_defaults_are_ones(backend: str):
    # h = a h + x, y = h: a running sum that forgets
    a = inputs(6, rate=False, b=False, c="ones", state=False, decay="mild")
    with kernels.backend(backend):
        y, state = kernels.selective_scan(**a)
    assert state is None
    h = torch.zeros_like(y[:, 0])
    for t in range(6):
        h = a["log_decay"][:, t].exp() * h + a["x"][:, t]
        torch.testing.assert_close(y[:, t], h)
    ones = {"rate": torch.ones(4, 1), "b": torch.ones(2, 6, 1), "c": torch.ones(4, 1)}
    with kernels.backend(backend):
        torch.testing.assert_close(kernels.selective_scan(**a, **{n: x.double() for n, x in ones.items()})[0], y)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("documents", [None, [0, 3, 3, 9]])
def test_scaled_inputs_and_a_skip_connection(documents: list[int] | None, backend: str):
    a = inputs(9, skip=True, documents=documents)
    with kernels.backend(backend):
        y, state = kernels.selective_scan(**a, scale_inputs=True, return_state=True)
        skipped = a.pop("skip") * a["x"]
        a["x"] = -a["log_decay"] * a["x"]
        expected, expected_state = kernels.selective_scan(**a, return_state=True)
    torch.testing.assert_close(y, expected + skipped)
    torch.testing.assert_close(state, expected_state)


def test_in_bf16_the_skip_is_added_before_rounding():
    """The skip almost cancels what the state gives; if each were rounded to bf16 first, their sum would be lost."""
    a = inputs(1, state=False, dtype=torch.float32)
    a["x"] = a["x"].bfloat16()
    read = kernels.selective_scan(**{**a, "x": a["x"].float()})[0]
    skip = (-0.99 * read[0, 0] / a["x"][0, 0]).float()
    y, _ = kernels.selective_scan(**a, skip=skip)
    torch.testing.assert_close(y[0].float(), (read + skip * a["x"])[0], rtol=2**-8, atol=0)


@pytest.mark.pairwise
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("c", READ_OUTS)
@pytest.mark.parametrize("length", [1, 17])
def test_gradients_of_a_skip_connection(length: int, c: str, scaled: bool):
    a = inputs(length, c=c, skip=True)
    assert_same(run(a, scale_inputs=scaled), run(a, backend="reference", scale_inputs=scaled))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("c", READ_OUTS)
@pytest.mark.parametrize("N", [1, 16])
@pytest.mark.parametrize("length", LENGTHS)
def test_backends_agree(length: int, N: int, c: str, dtype: torch.dtype):
    a = inputs(length, N=N, c=c, dtype=dtype)
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.pairwise
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("b", [True, False])
@pytest.mark.parametrize("c", READ_OUTS)
@pytest.mark.parametrize("length", [1, 17, 63])
def test_one_state_per_channel(length: int, c: str, b: bool, state: bool):
    a = inputs(length, rate=False, b=b, c=c, state=state)
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rate", [True, False])
@pytest.mark.parametrize("decay", DECAYS)
def test_any_decay(decay: str, rate: bool, dtype: torch.dtype):
    a = inputs(63, decay=decay, rate=rate, dtype=dtype)
    if rate:
        a["rate"] = 16 * a["rate"]  # down to e^-880 a step
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.parametrize("documents", [[0, 64], [0, 16, 64], [0, 0, 64], [0, 64, 64]])
def test_few_documents(documents: list[int]):
    a = inputs(64, documents=documents)
    assert_same(run(a), run(a, backend="reference"))


@pytest.mark.parametrize("c", ["each step", "constant"])
@pytest.mark.parametrize("name", ["x", "log_decay", "rate", "b", "c", "initial_state"])
def test_one_argument_in_fp64(name: str, c: str):
    a = inputs(20, c=c, dtype=torch.float32)
    a[name] = a[name].double()
    assert_same(run(a), run(a, backend="reference"), tolerance=2e-5)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda x: x[0]),
        ("x", lambda x: x.long()),
        ("log_decay", shorter(1)),
        ("log_decay", lambda x: x[..., None]),
        ("log_decay", lambda x: x.long()),
        ("rate", shorter(0)),
        ("rate", lambda x: x[0]),
        ("rate", lambda x: x.long()),
        ("b", shorter(1)),
        ("b", shorter(2)),
        ("b", lambda x: x.to("meta")),
        ("c", shorter(1)),
        ("c", lambda x: x[0]),  # [T,N] is not [D,N]
        ("c", lambda x: x.long()),
        ("skip", shorter(0)),
        ("skip", lambda x: x.long()),
        ("initial_state", shorter(0)),
        ("initial_state", lambda x: x.mT),
        ("initial_state", lambda x: x.long()),
        ("cu_seqlens", lambda x: torch.tensor([0, 10])),  # for two rows
    ],
)
def test_errors_name_the_argument(name: str, change):
    a = inputs(10, skip=True)
    kernels.selective_scan(**a)  # right as they are
    a[name] = change(a.get(name))
    with pytest.raises(ValueError, match=rf"^{name}: "):
        kernels.selective_scan(**a)


def test_negative_rates_are_refused():
    a = inputs(10)
    a["rate"][1, 0] = -0.5
    with pytest.raises(ValueError, match=r"^rate: must be ≥ 0, got -0.5$"):
        kernels.selective_scan(**a)
