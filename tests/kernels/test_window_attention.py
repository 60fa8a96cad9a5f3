import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import kernels
from kernels import deterministic
from kernels.core.documents import documents
from kernels.window_attention import CANDIDATES, candidates, flash, flex
from kernels.window_attention.arguments import Attention, check

from .comparisons import DEVICE

PACKED = [0, 0, 5, 70, 70, 135, 150, 150]


def attend(arguments: dict[str, Tensor], backend: str = "torch", **options: object) -> dict[str, Tensor]:
    """The output and the gradients of all inputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in arguments.items()}
    with kernels.backend(backend):
        o = kernels.window_attention(**leaves, **options)
    arriving = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(o)
    gradients = torch.autograd.grad((o * arriving).sum(), list(leaves.values()))
    return {"o": o.detach(), **dict(zip((f"d{name}" for name in leaves), gradients, strict=True))}


def decayed(a: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the inputs with log decays added, some of them close to a reset."""
    raw = 3 * torch.randn(*a["k"].shape[:2], a["q"].shape[2], dtype=torch.float64)
    return a | {"log_decay": torch.nn.functional.logsigmoid(raw)}


def inputs(
    T: int,
    S: int | None = None,
    *,
    B: int = 2,
    H: int = 4,
    Hkv: int = 2,
    D: int = 6,
    decaying: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    shape = {"q": (B, T, H, D), "k": (B, S or T, Hkv, D), "v": (B, S or T, Hkv, D)}
    a = {name: torch.randn(s, dtype=torch.float64).to(dtype) for name, s in shape.items()}
    return decayed(a) if decaying else a


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]):
    for name, x in expected.items():
        assert actual[name].isfinite().all(), name
        torch.testing.assert_close(actual[name], x, msg=lambda text, name=name: f"{name}: {text}")


either = pytest.mark.parametrize("decaying", [False, True])


@either
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_against_softmax_of_all_scores(window: int | None, backend: str, decaying: bool):
    # an independent computation: all scores at once, and the band cut out of them
    a = inputs(9, H=2, Hkv=2, decaying=decaying)
    with kernels.backend(backend):
        o = kernels.window_attention(**a, window_size=window, scale=0.3)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    band = (distance >= 0) & (distance < (window or 9))
    scores = 0.3 * torch.einsum("bthd,bshd->bhts", a["q"], a["k"])
    if decaying:
        total = a["log_decay"].cumsum(1).mT
        scores += total[..., None] - total[..., None, :]
    torch.testing.assert_close(
        o, torch.einsum("bhts,bshd->bthd", scores.masked_fill(~band, -torch.inf).softmax(-1), a["v"])
    )


@pytest.mark.pairwise
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, 1, 2, 64, 65, 100, 1000])
@pytest.mark.parametrize("length", [1, 15, 64, 65, 150])
def test_backends_agree(length: int, window: int | None, dtype: torch.dtype):
    a = inputs(length, dtype=dtype)
    assert_same(attend(a, window_size=window), attend(a, "reference", window_size=window))


@pytest.mark.parametrize("heads", [(3, 3), (4, 1), (6, 3)])
def test_key_heads_are_shared_in_order(heads: tuple[int, int]):
    H, Hkv = heads
    a = inputs(80, H=H, Hkv=Hkv)
    repeated = {**a, **{name: a[name].repeat_interleave(H // Hkv, 2) for name in "kv"}}
    o = kernels.window_attention(**repeated, window_size=20)
    torch.testing.assert_close(kernels.window_attention(**a, window_size=20), o)


@either
@pytest.mark.parametrize("window", [None, 1, 7, 64])
def test_packed_documents(window: int | None, decaying: bool):
    a = inputs(150, B=1, decaying=decaying)
    options = {"window_size": window, "cu_seqlens": torch.tensor(PACKED)}
    actual = attend(a, **options)
    assert_same(actual, attend(a, "reference", **options))
    for i, j in pairwise(PACKED):
        if j > i:
            alone = kernels.window_attention(**{name: x[:, i:j] for name, x in a.items()}, window_size=window)
            torch.testing.assert_close(actual["o"][:, i:j], alone)


@either
@pytest.mark.parametrize("window", [None, 1, 7, 64, 200])
@pytest.mark.parametrize("new", [1, 5, 70])
def test_more_keys_than_queries_continue(new: int, window: int | None, decaying: bool):
    # the last queries of the whole, against all of its keys
    a = inputs(90, decaying=decaying)
    whole = kernels.window_attention(**a, window_size=window)
    late = {**a, "q": a["q"][:, -new:]}
    actual = attend(late, window_size=window)
    torch.testing.assert_close(actual["o"], whole[:, -new:])
    assert_same(actual, attend(late, "reference", window_size=window))


@either
@pytest.mark.parametrize("window", [None, 4, 64])
@pytest.mark.parametrize("length", [1, 6, 12])
def test_first_key(length: int, window: int | None, decaying: bool):
    # rows with all keys, some keys, the last key only, and none at all
    a = inputs(length, 12, B=4, decaying=decaying)
    options = {"window_size": window, "first_key": torch.tensor([0, 5, 11, 12])}
    actual = attend(a, **options)
    assert_same(actual, attend(a, "reference", **options))
    assert not actual["o"][3].any()
    shorter = {name: x[1:2, max(0, length - 7) :] if name == "q" else x[1:2, 5:] for name, x in a.items()}
    torch.testing.assert_close(actual["o"][1:2, -7:], kernels.window_attention(**shorter, window_size=window))


@pytest.mark.parametrize("window", [None, 1, 7, 64])
@pytest.mark.parametrize("length", [1, 70])
def test_decays(length: int, window: int | None):
    a = decayed(inputs(length))
    assert_same(attend(a, window_size=window), attend(a, "reference", window_size=window))
    with deterministic():
        assert_same(attend(a, window_size=window), attend(a, "reference", window_size=window))


def test_the_decay_of_a_first_token_has_no_gradient():
    a = {name: x.float() for name, x in decayed(inputs(150, B=1)).items()}
    for bounds in (PACKED, [*range(151)]):
        gradient = attend(a, cu_seqlens=torch.tensor(bounds))["dlog_decay"][0]
        assert not gradient[[i for i, j in pairwise(bounds) if j > i]].any()
        assert gradient.any() == (len(bounds) < 150)


def test_decays_keep_their_digits_in_bf16():
    a = decayed(inputs(3000, B=1, H=2, D=16))
    exact = kernels.window_attention(**a)
    assert a["log_decay"].sum() < -4000  # where numbers in bf16 are 32 apart
    half = {name: x.float() if name == "log_decay" else x.bfloat16() for name, x in a.items()}
    o = kernels.window_attention(**half)
    assert o.dtype == torch.bfloat16
    assert (o.double() - exact).norm() < 0.01 * exact.norm()
    one = {name: x[:, -1:] if name == "q" else x for name, x in half.items()}
    assert (kernels.window_attention(**one).double() - exact[:, -1:]).norm() < 0.01 * exact[:, -1:].norm()


@pytest.mark.parametrize("window", [None, 20])
@torch.no_grad()
def test_decays_elsewhere_change_no_bit(window: int | None):
    """Those of later tokens, and of other documents, even if their sums are large."""
    a = {name: x.float() for name, x in decayed(inputs(150, B=1)).items()}
    for start, bounds in ((90, None), (70, torch.tensor([0, 70, 150]))):
        options = {"window_size": window, "cu_seqlens": bounds}
        changed = a | {"log_decay": a["log_decay"].index_fill(1, torch.arange(start, 150), -100.0)}
        o = kernels.window_attention(**a, **options)
        assert torch.equal(kernels.window_attention(**changed, **options)[:, :start], o[:, :start])


@torch.no_grad()
def test_decays_in_a_wider_dtype():
    a = {name: x.float() for name, x in decayed(inputs(40, B=1)).items()}
    o = kernels.window_attention(**a | {"log_decay": a["log_decay"].double()})
    assert o.dtype == torch.float32
    assert (o - kernels.window_attention(**a)).norm() < 1e-5 * o.norm()


@torch.no_grad()
@pytest.mark.parametrize(("queries", "window"), [(2000, None), (2, None), (2, 300), (65, 20)])
def test_sums_of_decays_keep_their_digits(queries: int, window: int | None):
    a = decayed(inputs(2000, B=1, H=2, D=16))
    a |= {"q": a["q"][:, -queries:], "log_decay": -3 * torch.rand_like(a["log_decay"])}
    a = {name: x.float() for name, x in a.items()}
    exact = kernels.window_attention(**{name: x.double() for name, x in a.items()}, window_size=window)
    o = kernels.window_attention(**a, window_size=window)
    assert (o.double() - exact).norm() < 1e-6 * exact.norm()


@torch.no_grad()
def test_scores_keep_their_digits_behind_large_sums():
    a = decayed(inputs(2000, B=1, H=2, D=16))
    a["log_decay"] = a["log_decay"].clamp(min=-8).mul(4).round() / 4  # sums without rounding
    exact = kernels.window_attention(**a)
    o = kernels.window_attention(**{name: x.float() for name, x in a.items()})
    assert (o.double() - exact).norm() < 1e-6 * exact.norm()


# Resets: log decays of −∞, or too small for sums. Scores are not bounded, so a reset is a mask.


def resetting(a: dict[str, Tensor], value: float = -math.inf) -> dict[str, Tensor]:
    """Return the inputs with log decays, one in ten of which resets its head, and scores in the hundreds."""
    a = decayed(a)
    reset = torch.rand(a["log_decay"].shape) < 0.1
    return a | {"k": 100 * a["k"], "log_decay": a["log_decay"].masked_fill(reset, value)}


@pytest.mark.parametrize("queries", [1, 2, 3])
@pytest.mark.parametrize("backend", ["reference", "torch", "deterministic"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_score_wins_against_a_reset(dtype: torch.dtype, backend: str, queries: int):
    k, v = (torch.tensor(x, dtype=dtype).view(1, 3, 1, 1) for x in ([300, 0, 100], [1, 2, 3]))
    for value in (-math.inf, torch.finfo(torch.bfloat16).min, -20_000.0):
        log_decay = torch.tensor([0, 0, value]).view(1, 3, 1)
        with deterministic(backend == "deterministic"), kernels.backend(backend.replace("deterministic", "torch")):
            o = kernels.window_attention(torch.ones_like(v[:, :queries]), k, v, log_decay=log_decay)
        assert o.flatten().tolist() == [1, 1, 3][-queries:]


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("backend", ["reference", "torch", "deterministic"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_strong_decays_lower_scores_by_what_they_are(dtype: torch.dtype, backend: str, queries: int):
    v = torch.tensor([1, 2, 3], dtype=dtype).view(1, 3, 1, 1)
    log_decay = torch.tensor([0, 0, -400.0]).view(1, 3, 1)
    for lead, expected in ((300, 3), (500, 1)):
        k = torch.tensor([lead, 0, 0], dtype=dtype).view(1, 3, 1, 1)
        with deterministic(backend == "deterministic"), kernels.backend(backend.replace("deterministic", "torch")):
            o = kernels.window_attention(torch.ones_like(v[:, :queries]), k, v, log_decay=log_decay)
        assert o.flatten()[-1] == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "deterministic"])
@pytest.mark.parametrize("value", [-math.inf, -1e30])
@pytest.mark.parametrize(
    ("length", "keys", "window", "options"),
    [
        (1, 12, None, {}),
        (1, 12, 4, {"first_key": [0, 5, 11, 12]}),
        (6, 12, 4, {"first_key": [0, 5, 11, 12]}),
        (12, 12, None, {"first_key": [0, 5, 11, 12]}),
        (70, 70, None, {}),
        (70, 70, 7, {}),
        (150, 150, 20, {"cu_seqlens": PACKED}),
        (150, 150, None, {"cu_seqlens": PACKED}),
    ],
    ids=str,
)
def test_resets(length: int, keys: int, window: int | None, options: dict, value: float, mode: str):
    a = resetting(inputs(length, keys, B=1 if "cu_seqlens" in options else 4), value)
    options = {"window_size": window, **{name: torch.tensor(x) for name, x in options.items()}}
    expected = attend(a, "reference", **options)
    with deterministic(mode == "deterministic"):
        assert_same(attend(a, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 600])
def test_resets_over_several_blocks_of_queries(window: int | None):
    a = resetting(inputs(1200, B=1, H=2, Hkv=1))
    first = a["log_decay"].float().masked_fill(a["log_decay"] > -1e4, 0).ne(0).long() * torch.arange(1200)[:, None]
    first, key = first.cummax(1).values.mT[..., None], torch.arange(1200)
    seen = (key <= key[:, None]) & (key > key[:, None] - (window or 1200)) & (key >= first)
    total = a["log_decay"].masked_fill(a["log_decay"] < -1e4, 0).cumsum(1).mT
    scores = torch.einsum("bthd,bsd->bhts", a["q"], a["k"][:, :, 0]) * 6**-0.5 + total[..., None] - total[..., None, :]
    expected = torch.einsum("bhts,bsd->bthd", scores.masked_fill(~seen, -torch.inf).softmax(-1), a["v"][:, :, 0])
    torch.testing.assert_close(kernels.window_attention(**a, window_size=window), expected)


@pytest.mark.parametrize("backend", ["reference", "torch", "deterministic"])
@pytest.mark.parametrize("queries", [1, 100])
def test_nothing_passes_a_reset(queries: int, backend: str):
    """Gradients before it are exactly 0, and outputs behind it have the same bits whatever was before."""
    a = {name: x.float() for name, x in decayed(inputs(100, B=1)).items()}
    a["log_decay"][:, 40] = -math.inf
    a["q"] = a["q"][:, -queries:]
    other = a | {name: a[name].clone() for name in "kv"}
    other["k"][:, :40] *= 1e4
    other["v"][:, :40] *= 1e18
    with deterministic(backend == "deterministic"), kernels.backend(backend.replace("deterministic", "torch")):
        leaves = {name: x.clone().requires_grad_() for name, x in a.items()}
        o = kernels.window_attention(**leaves)[:, -60:]
        gradients = dict(zip(leaves, torch.autograd.grad(o.square().sum(), list(leaves.values())), strict=True))
        assert torch.equal(kernels.window_attention(**other)[:, -60:], o)
    for name in ("k", "v", "log_decay"):
        assert not gradients[name][:, : 40 + (name == "log_decay")].any(), name
        assert gradients[name][:, 41:].any(), name


@pytest.mark.parametrize("decaying", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("size", [3, 11])
def test_values_of_another_size(size: int, window: int | None, decaying: bool):
    a = inputs(70)
    a["v"] = torch.randn(2, 70, 2, size, dtype=torch.float64)
    a = decayed(a) if decaying else a
    expected = attend(a, "reference", window_size=window)
    assert expected["o"].shape == (2, 70, 4, size)
    assert_same(attend(a, window_size=window), expected)
    with deterministic():
        assert_same(attend(a, window_size=window), expected)
    step = a | {"q": a["q"][:, -1:]}
    assert_same(attend(step, window_size=window), attend(step, "reference", window_size=window))


def test_a_query_before_the_first_key_is_zero_with_finite_gradients():
    actual = attend(inputs(6, B=1), first_key=torch.tensor([4]))
    assert not actual["o"][0, :4].any()
    assert actual["o"][0, 4:].any()
    assert not actual["dq"][0, :4].any()
    assert not actual["dk"][0, :4].any()


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("bounds", [None, [0, 30, 70]])
def test_scales_that_are_not_positive(bounds: list[int] | None, scale: float):
    a = inputs(70, B=1)
    options = {"scale": scale, "cu_seqlens": None if bounds is None else torch.tensor(bounds)}
    assert_same(attend(a, **options), attend(a, "reference", **options))


def test_bf16():
    a = inputs(100, dtype=torch.bfloat16)
    o = kernels.window_attention(**a, window_size=30)
    assert o.dtype == torch.bfloat16
    exact = kernels.window_attention(**{name: x.double() for name, x in a.items()}, window_size=30)
    assert (o.double() - exact).norm() < 0.01 * exact.norm()


def test_scale_defaults_to_the_head_size():
    a = inputs(10, D=16)
    o = kernels.window_attention(**a, scale=0.25)
    torch.testing.assert_close(kernels.window_attention(**a), o)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_views_of_one_projection(backend: str):
    fused = torch.randn(2, 70, 4 * 6 + 2 * 2 * 6, dtype=torch.float64)
    q, k, v = (x.unflatten(-1, (-1, 6)) for x in fused.split([24, 12, 12], -1))
    views = {"q": q, "k": k, "v": v}
    copies = {name: x.contiguous() for name, x in views.items()}
    assert_same(attend(views, backend, window_size=20), attend(copies, backend, window_size=20))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda x: x[0]),
        ("q", lambda x: x[:, :0]),
        ("k", lambda x: x[:1]),
        ("k", lambda x: x[..., :5]),
        ("k", lambda x: x[:, :9]),  # fewer keys than queries
        ("k", lambda x: x[:, :, :1].expand(-1, -1, 3, -1)),  # three key heads for four
        ("k", lambda x: x.float()),
        ("v", lambda x: x[:, :9]),
        ("v", lambda x: x.float()),
        ("v", lambda x: x[0]),
        ("log_decay", lambda x: torch.zeros(2, 10, 2)),
        ("log_decay", lambda x: torch.zeros(2, 10, 4, dtype=torch.int64)),
        ("log_decay", lambda x: torch.zeros(2, 10, 4, device="meta")),
        ("log_decay", lambda x: torch.full((2, 10, 4), 0.5)),
        ("v", lambda x: x.to("meta")),
        ("q", lambda x: x.long()),
        ("k", lambda x: x[:, :, :0]),
        ("scale", lambda x: float("nan")),
        ("window_size", lambda x: 0),
        ("window_size", lambda x: 1.5),
        ("window_size", lambda x: True),
        ("first_key", lambda x: torch.zeros(3, dtype=torch.int64)),
        ("first_key", lambda x: torch.zeros(2)),
        ("cu_seqlens", lambda x: torch.tensor([0, 10])),  # two rows
    ],
)
def test_errors_name_the_argument(name: str, change):
    a = inputs(10)
    kernels.window_attention(**a)  # right as they are
    a[name] = change(a.get(name))
    with pytest.raises(ValueError, match=rf"^{name}: "):
        kernels.window_attention(**a)


@pytest.mark.parametrize("bounds", [[0, 9], [0, 6, 5, 10], [1, 10]])
def test_boundaries_that_do_not_fit(bounds: list[int]):
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        kernels.window_attention(**inputs(10, B=1), cu_seqlens=torch.tensor(bounds))


def test_documents_cannot_be_continued():
    bounds = torch.tensor([0, 10])
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        kernels.window_attention(**inputs(10, 12, B=1), cu_seqlens=bounds)
    with pytest.raises(ValueError, match=r"^cu_seqlens: "):
        kernels.window_attention(**inputs(10, B=1), cu_seqlens=bounds, first_key=torch.tensor([0]))


# Several ways inside the backend `torch`. Most of them need a GPU; what can be compared here, is.

HALF = {"B": 2, "H": 4, "Hkv": 4, "D": 16, "dtype": torch.bfloat16}


def call(T: int, S: int | None = None, *, window: int | None = None, documents: list[int] | None = None, **options):
    """The checked arguments of a call."""
    options = {**options, "B": 1} if documents else options
    bounds = None if documents is None else torch.tensor(documents, dtype=torch.int32, device=DEVICE)
    a = {name: x.to(DEVICE) for name, x in inputs(T, S, **options).items()}
    return check(**a, window_size=window, first_key=None, scale=None, cu_seqlens=bounds)


def on_gpu(a: Attention) -> Attention:
    """The same call, which says of itself that it is on a GPU."""

    class Elsewhere(torch.Tensor):
        is_cuda = True

    return dataclasses.replace(a, **{name: getattr(a, name).as_subclass(Elsewhere) for name in "qkv"})


def test_on_a_processor_and_in_fp32_nothing_new_is_tried():
    assert candidates.chosen(call(300, window=20, **HALF)) == ("chunk" if DEVICE == "cpu" else "flash")
    assert candidates.chosen(on_gpu(call(300, window=20, **{**HALF, "dtype": torch.float32}))) == "chunk"
    assert candidates.chosen(call(300, dtype=torch.float32)) == "chunk"


@pytest.mark.parametrize(
    ("name", "a"),
    [
        ("chunk", {"T": 300}),
        ("flex", {"T": 300, "window": 20}),
        ("flash", {"T": 300, "window": 20, "D": 24}),
        ("flex", {"T": 300, "window": 20, "documents": [0, 100, 300]}),
        ("flash", {"T": 300, "documents": [0, 100, 300]}),
        ("chunk", {"T": 300, "window": 20, "D": 12}),  # no size for any kernel
        ("chunk", {"T": 30, "S": 60}),
        ("step", {"T": 1, "S": 60}),
    ],
)
def test_choice_on_a_gpu(name: str, a: dict):
    assert candidates.chosen(on_gpu(call(**{**HALF, **a}))) == name


def test_every_kind_of_call_has_a_rule_and_somebody_who_serves_it():
    assert {*candidates.RULES} == {*itertools.product([False, True], repeat=2)}
    assert all(names[-1] == "chunk" and {*names} <= {*CANDIDATES} for names in candidates.RULES.values())


@pytest.mark.parametrize(("name", "size"), [("triton", 16), ("triton", 256), ("chunk", 12), ("chunk", 512)])
def test_choice_on_a_gpu_with_decays(name: str, size: int):
    for options in ({}, {"window": 20}, {"documents": [0, 100, 300]}):
        a = on_gpu(call(300, **{**HALF, "D": size}, **options))
        assert candidates.chosen(dataclasses.replace(a, log_decay=torch.zeros(1, 300, 4))) == name


def same_as_blocks_of_scores(name: str, a: Attention, tolerance: float = 1e-5):
    """Output, and gradients if it has some, of a candidate and of `chunk`."""
    learning, leaves = a.q.requires_grad, learned(a)
    assert CANDIDATES[name].serves(a)
    o, expected = (CANDIDATES[n].forward(a) for n in (name, "chunk"))
    actual = [o]
    if learning:
        arriving = torch.randn_like(o)
        actual += torch.autograd.grad(o, leaves, arriving)
        expected = [expected, *torch.autograd.grad(expected, leaves, arriving)]
    for x, y in zip(actual, expected if learning else [expected], strict=True):
        assert (x - y).norm() <= tolerance * (1 + y.norm())


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="it is compiled there")
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("documents", [None, [0, 0, 5, 130, 131, 131, 300]])
@pytest.mark.parametrize("window", [None, 1, 50, 128, 257])
def test_flex(window: int | None, documents: list[int] | None):
    a = call(300, window=window, documents=documents, D=16, dtype=torch.float32)
    same_as_blocks_of_scores("flex", a)
    blocks = flex.mask(a)
    assert flex.mask(a) is blocks
    usual = create_block_mask(blocks.mask_mod, None, None, 300, 300, device=DEVICE)  # looks at every score
    assert torch.equal(blocks.kv_num_blocks, usual.kv_num_blocks)
    assert torch.equal(blocks.full_kv_num_blocks, usual.full_kv_num_blocks)
    assert torch.equal(blocks.to_dense(), usual.to_dense())


def test_a_mask_from_an_evaluation_serves_training():
    bounds = torch.tensor([0, 200, 400], dtype=torch.int32)
    packed = dataclasses.replace(call(400, B=1), cu_seqlens=bounds, documents=documents(bounds, 400))
    for a in (call(400, window=77), packed):
        with torch.inference_mode():
            mask = flex.mask(a)
        assert not mask.kv_indices.is_inference()
        assert flex.mask(a) is mask


@pytest.mark.parametrize("documents", [None, PACKED])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_flash_is_asked_for_the_right_thing(heads, window, documents, monkeypatch: pytest.MonkeyPatch):
    """PyTorch's kernel is not there on a processor: the definition of what it computes takes its place."""

    def attention(q, k, v, bounds, bounds_k, longest, longest_k, *, scale, window_size, enable_gqa=False):
        assert torch.equal(bounds, bounds_k)
        assert bounds.dtype == torch.int32
        assert longest == longest_k == int(bounds.diff().max())
        assert enable_gqa == (q.shape[1] != k.shape[1])
        owner = torch.searchsorted(bounds, torch.arange(len(q)), right=True)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        left, right = window_size
        seen = (distance >= -right) & (owner[:, None] == owner)
        if left >= 0:
            seen &= distance <= left
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k).float() * scale
        return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype), v)

    monkeypatch.setattr(flash, "attention", lambda: attention)
    monkeypatch.setattr(flash, "has", inspect.signature(attention).parameters.__contains__)  # whatever this PyTorch has
    a = call(150, window=window, documents=documents, **{**HALF, "H": heads[0], "Hkv": heads[1]})
    same_as_blocks_of_scores("flash", a, 1e-2)


def test_flash_knows_which_options_pytorch_has():
    assert flash.has("window_size")
    assert not flash.has("windw_size")


def test_where_pytorch_has_no_windows_yet_another_way_is_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flash, "has", lambda option: option != "window_size")
    assert candidates.chosen(on_gpu(call(300, window=20, **HALF))) == "flex"


def decaying(a: Attention) -> Attention:
    """Return the call with log decays added."""
    decay = decayed({name: getattr(a, name) for name in "qkv"})["log_decay"]
    return dataclasses.replace(a, log_decay=decay.float().to(a.q.device))


def leaves(a: Attention) -> Attention:
    """The same call, whose gradients are wanted."""
    parts = {"q": a.q, "k": a.k, "v": a.v, "log_decay": a.log_decay}
    return dataclasses.replace(a, **{n: x.detach().requires_grad_() for n, x in parts.items() if x is not None})


def learned(a: Attention) -> list[Tensor]:
    """What has gradients."""
    return [x for x in (a.q, a.k, a.v, a.log_decay) if x is not None]


@pytest.mark.parametrize("window", [None, 1, 4, 12])
@pytest.mark.parametrize("first_key", [None, [0, 5, 11, 12]])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_a_step_is_a_row_of_scores(heads: tuple[int, int], first_key: list[int] | None, window: int | None):
    H, Hkv = heads
    a = leaves(call(1, 12, B=4, window=window, H=H, Hkv=Hkv, dtype=torch.float32))
    a = dataclasses.replace(a, first_key=None if first_key is None else torch.tensor(first_key, device=DEVICE))
    same_as_blocks_of_scores("step", a)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["all keys", "window", "packed"])
@pytest.mark.parametrize("backend", ["reference", "torch", "deterministic"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_autocast_rounds_arguments_on_every_path(dtype: torch.dtype, backend: str, case: str):
    bounds = torch.tensor([0, 4, 9], device=DEVICE)
    options = {"all keys": {}, "window": {"window_size": 3}, "packed": {"cu_seqlens": bounds}}[case]
    a = {name: x.to(DEVICE) for name, x in inputs(9, B=1, dtype=dtype).items()}
    log_decay = -torch.rand(1, 9, 4, device=DEVICE)
    rounded = a if dtype == torch.float64 else {name: x.bfloat16() for name, x in a.items()}
    name = "reference" if backend == "reference" else "torch"
    for further in ({}, {"log_decay": log_decay}):
        with deterministic(backend == "deterministic"), kernels.backend(name):
            expected = kernels.window_attention(**rounded, **options, **further)
            with torch.autocast(DEVICE, torch.bfloat16):
                o = kernels.window_attention(**a, **options, **further)
        assert o.dtype == rounded["v"].dtype
        torch.testing.assert_close(o, expected)


def test_the_meta_device_has_no_autocast():  # FLOPs are counted there
    a = {name: x.to("meta") for name, x in inputs(9).items()}
    with torch.autocast("cpu", torch.bfloat16):
        o = kernels.window_attention(**a)
    assert o.is_meta
    assert o.shape == a["q"].shape


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "flash", "chunk"])
def test_the_choice_and_the_chosen_compile_as_one_graph(name: str, monkeypatch: pytest.MonkeyPatch):
    assert flash.has("window_size")  # found out once, and not from what replaces it
    monkeypatch.setattr(flash, "attention", lambda: lambda q, k, v, bounds, *rest, **options: q * v + bounds[-1])
    monkeypatch.setattr(candidates, "chosen", lambda a: name if CANDIDATES[name].serves(a) else "")
    a = {key: x.to(DEVICE) for key, x in inputs(64, **HALF).items()}
    a["q"] = a["q"][:, -1:] if name == "step" else a["q"]
    expected = kernels.window_attention(**a, window_size=32)
    torch._dynamo.reset()
    compiled = torch.compile(kernels.window_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**a, window_size=32), expected)


# On a device: each candidate against fp32 at the sizes it is for.


def close_to_fp32(forward: Callable[[Attention], Tensor], a: Attention) -> None:
    """Output and gradients, compared with those of blocks of scores."""
    exact = leaves(dataclasses.replace(a, **{x: getattr(a, x).float() for x in "qkv"}))
    actual, expected = forward(a), CANDIDATES["chunk"].forward(exact)
    arriving = torch.randn_like(actual)
    actual = [actual, *torch.autograd.grad(actual, learned(a), arriving)]
    expected = [expected, *torch.autograd.grad(expected, learned(exact), arriving.float())]
    for x, y in zip(actual, expected, strict=True):
        assert x.isfinite().all()
        assert (x - y).norm() <= 1e-2 * y.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash", "flex", "chunk"])
@pytest.mark.parametrize(
    "options",
    [
        {"T": 4096, "window": 1024, "D": 128},
        {"T": 4096, "window": 1024, "D": 64, "H": 8, "Hkv": 2},
        {"T": 3001, "window": 777, "D": 128},
        {"T": 3001, "D": 128},
        {"T": 4000, "window": 300, "D": 64, "documents": [0, 0, 1, 130, 1000, 1000, 3999, 4000]},
        {"T": 4000, "D": 128, "documents": [0, 0, 1, 130, 1000, 1000, 3999, 4000], "H": 8, "Hkv": 2},
    ],
    ids=str,
)
def test_on_device(name: str, options: dict):
    a = leaves(call(**{**HALF, **options}))
    if not CANDIDATES[name].serves(a):
        pytest.skip("does not serve this call")
    close_to_fp32(CANDIDATES[name].forward, a)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 777}, {"documents": [0, 1, 130, 1000, 1000, 3001]}, {"H": 8, "Hkv": 2}, {"D": 96}],
    ids=str,
)
@pytest.mark.parametrize("resets", [False, True])
def test_on_device_with_decays(resets: bool, options: dict):
    a = leaves(decaying(call(**{**HALF, "T": 3001, "D": 64, **options})))
    if resets:
        with torch.no_grad():
            a.log_decay.masked_fill_(torch.rand_like(a.log_decay) < 0.01, -math.inf)
    close_to_fp32(candidates.forward, a)


@pytest.mark.gpu
def test_on_device_the_whole_op_compiles_and_repeats():
    a = {name: x.cuda() for name, x in inputs(2048, D=64, dtype=torch.bfloat16).items()}
    o = kernels.window_attention(**a, window_size=300)
    compiled = torch.compile(kernels.window_attention, fullgraph=True)
    torch.testing.assert_close(compiled(**a, window_size=300), o, rtol=2e-2, atol=2e-2)
    for _ in range(20):
        assert torch.equal(kernels.window_attention(**a, window_size=300), o)


@pytest.mark.gpu
def test_on_device_decoding_in_bf16():
    a = {name: x.cuda() for name, x in inputs(1, 2048, B=8, H=8, D=128, dtype=torch.bfloat16).items()}
    first = torch.arange(8, device="cuda") * 250
    o = kernels.window_attention(**a, first_key=first)
    with kernels.backend("reference"):
        expected = kernels.window_attention(**{name: x.float() for name, x in a.items()}, first_key=first)
    assert (o - expected).norm() <= 1e-2 * expected.norm()
