"""Attention of one new token per row to a cache with room: the loop, PyTorch, and Triton in two launches."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import kernels
from kernels import AttentionOps, KeyCache, QKNorm, Turn
from kernels.window_attention import token

from .places import PLACES

pytest.importorskip("triton")
from kernels.gpu.device import GPUS, assumed
from kernels.gpu.paths import dry_run
from kernels.window_attention.gpu.token import launches_of

pytestmark = pytest.mark.usefixtures("poison")


class Case(NamedTuple):
    seen: tuple[int, ...] = (0, 1, 13)  # earlier tokens of each row
    R: int = 20
    H: int = 2
    heads: int = 2
    D: int = 8
    V: int = 8
    window: int | None = None
    decay: bool = False
    same: bool = False  # whether values are the first channels of the keys
    scale: float | None = None
    dtype: torch.dtype = torch.float32


BORDERS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 127, 128)
CASES = [
    Case(),
    Case(BORDERS, 129, 1, 1, 16, 16),
    Case(BORDERS, 129, 1, 1, 16, 16, decay=True),
    Case(BORDERS, 129, 1, 1, 128, 64, decay=True),
    Case(BORDERS, 129, 4, 2, 32, 16, dtype=torch.float16),
    Case(BORDERS, 129, 4, 2, 64, 64, decay=True, dtype=torch.float16),
    Case((0, 5, 6, 7, 33, 70), 7, window=7),  # a window whose entries are overwritten
    Case((0, 5, 6, 7, 33, 70), 16, window=7, H=4),
    Case((40, 50, 99), 48, window=40, decay=True),
    Case((30, 3), 16),  # more tokens than entries
    Case((30, 3), 31, window=1),
    Case((30, 3), 31, window=500),
    Case((60, 61, 3), 64, 6, 2, 24, 20),
    Case((60, 61, 3), 64, 6, 2, 24, 20, decay=True, dtype=torch.bfloat16),
    Case((60, 9), 64, 3, 1, 1, 1),
    Case((60, 9), 64, 2, 2, 20, 36, scale=-0.3),
    Case((60, 9), 64, 1, 1, 256, 256, scale=0.0),
    Case((60,), 64, 2, 1, 256, 256, dtype=torch.bfloat16),
    Case((60, 9), 64, 20, 1, 80, 64, same=True, dtype=torch.bfloat16),  # products of 32 rows
    Case((60,), 64, 40, 1, 24, 24, dtype=torch.float16),  # of two blocks of them
    Case((40,), 64, 3, 1, 72, 72, same=True),
    Case((33,), 40, 16, 1, 576, 512, same=True, dtype=torch.bfloat16),
    Case((33,), 40, 2, 1, 576, 512, same=True),
    Case((33,), 40, 4, 1, 320, 256, same=True, dtype=torch.bfloat16),
]


def arguments(case: Case, device: str = "cpu", resets: float = 0.05) -> dict[str, Any]:
    """Arguments whose new entries are columns of one projection, with NaN in entries that no token has."""
    generator = torch.Generator().manual_seed(0)
    B, R, H, heads, D, V = len(case.seen), *case[1:6]

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    widths = [H * D, heads * D] if case.same else [H * D, heads * D, heads * V]
    q, k, *v = (x.unflatten(-1, (-1, D)) for x in draw(B, 1, sum(widths[:2])).split(widths[:2], -1))
    k, v = (k, k[..., :V]) if case.same else (k, draw(B, 1, heads * V + 3)[..., :-3].unflatten(-1, (heads, V)))
    seen, keys, values = torch.tensor(case.seen, device=device), draw(B, R, heads, D), draw(B, R, heads, V)
    log_decay, decays = (logsigmoid(3 * draw(B, n, H).float() + 2) for n in (1, R))
    log_decay[0, 0, 0] = -math.inf if case.decay and resets else log_decay[0, 0, 0]
    decays = decays.masked_fill(draw(B, R, H).sigmoid() < resets, -math.inf)
    entries = (keys, keys[..., :V] if case.same else values, decays)
    cache = KeyCache(entries if case.decay else entries[:2], seen, torch.full_like(seen, -1))
    others = {"window_size": case.window, "scale": case.scale, "log_decay": log_decay if case.decay else None}
    return {"q": q, "k": k, "v": v, "cache": cache, **others}


@torch.no_grad()
def run(a: dict[str, Any], backend: str, device: str = "cpu") -> tuple[Tensor, ...]:
    """The output, the entries after the token and the next counts; without a GPU, with as many programs as an H200."""
    with kernels.backend(backend), assumed(GPUS["H200"]) if device == "cpu" else nullcontext():
        o = kernels.window_attention(**a)
    cache = a["cache"]
    return o, *cache.entries, *([] if cache.following is None else [cache.following])


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float):
    (x, *written), (y, *entries) = actual, expected
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
    assert float((x.double() - y.double()).norm()) <= tolerance * max(float(y.double().norm()), 1e-3)
    assert all(map(torch.equal, written, entries))


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def plain(a: dict[str, Any], row: int) -> Tensor:
    """The output of one row by attention to all of its tokens in order, without a cache."""
    cache, seen = a["cache"], int(a["cache"].seen[row])
    size = cache.entries[0].shape[1]
    tokens = [t % size for t in range(max(0, seen - size + 1), seen)]
    names = ("k", "v", "log_decay")[: len(cache.entries)]
    streams = {
        name: torch.cat([x[row : row + 1, tokens], a[name][row : row + 1].to(x.dtype)], 1)
        for name, x in zip(names, cache.entries, strict=True)
    }
    with kernels.backend("reference"):
        options = {"window_size": a["window_size"], "scale": a["scale"]}
        return kernels.window_attention(a["q"][row : row + 1], **streams, **options)


@pytest.mark.slow
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("case", CASES)
def test_attention_to_the_tokens_in_order(case: Case, device: str):
    a = arguments(case, device)
    expected = torch.cat([plain(a, row) for row in range(len(case.seen))])
    before = [x.clone() for x in a["cache"].entries]
    reference = run(a, "reference", device)
    assert_close(reference[:1], (expected,), 1e-6 if case.dtype == torch.float32 else TOLERANCE[case.dtype])
    for name, x, old in zip(("k", "v", "log_decay"), a["cache"].entries, before, strict=False):
        for row, seen in enumerate(case.seen):
            old[row, seen % case.R] = a[name][row, 0]
        assert torch.equal(x, old)
    assert a["cache"].seen.tolist() == list(case.seen)
    assert reference[-1].tolist() == [count + 1 for count in case.seen]
    for name in ("torch", "triton"):
        with kernels.implementations() as ran:
            actual = run(arguments(case, device), name, device)
        assert ran == {"window_attention_token": {name}}
        assert_close(actual, reference, TOLERANCE[case.dtype])


@pytest.mark.parametrize("device", PLACES)
def test_entries_of_no_token_are_not_read(device: str):
    a = arguments(Case((0, 3, 9), 40, decay=True), device)
    expected = run(arguments(Case((0, 3, 9), 40, decay=True), device), "reference", device)
    for x in a["cache"].entries:
        for row, seen in enumerate((0, 3, 9)):
            x[row, seen:] = math.nan
    o, *_ = run(a, "triton", device)
    assert_close((o,), expected[:1], 1e-5)


@pytest.mark.parametrize("device", PLACES)
def test_a_key_that_is_no_number_shows(device: str):
    a = arguments(Case((20, 20), 64), device)
    a["cache"].entries[0][1, 7] = math.nan
    o, *_ = run(a, "triton", device)
    assert o[0].isfinite().all()
    assert o[1].isnan().all()


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("at", [0, 1, 17, 40, 59])
def test_a_reset_hides_whatever_is_before_it(at: int, device: str):
    """Also a key whose score would win by far."""
    case = Case((60,), 64, 4, 2, 16, 16, decay=True, dtype=torch.float16)
    results = []
    for value in (1.0, 100.0):
        a = arguments(case, device, resets=0)
        k, v, decays = a["cache"].entries
        decays[:, at] = -20_000.0
        v[:, :at] = value
        k[:, :at] = 30 * a["q"][:, :, :2]
        results.append(run(a, "triton", device)[0])
    assert torch.equal(*results)
    a["log_decay"][:] = -math.inf
    assert torch.equal(run(a, "triton", device)[0], a["v"].repeat_interleave(2, 2))


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("score", [-3000.0, 3000.0])
def test_scores_far_from_those_of_no_token(score: float, device: str):
    """A part of the cache without tokens has neither a score nor a weight."""
    case = Case((1, 20), 64, 1, 1, 256, 256)  # of four parts
    results = []
    for name in ("reference", "triton"):
        a = arguments(case, device)
        for x in (a["k"], a["cache"].entries[0]):
            x.copy_(a["q"] * score / a["q"].square().sum(-1, keepdim=True))
        results.append(run(a, name, device))
    assert_close(results[1], results[0], 1e-3)


@pytest.mark.parametrize("device", PLACES)
def test_the_newest_of_many_tokens_decide_where_decays_are_strong(device: str):
    """Sums of log decays are far larger than the differences that matter."""
    case = Case((120,), 128, 2, 2, 16, 16, decay=True)
    for factor in (1.0, 300.0):
        results = []
        for name in ("reference", "triton"):
            a = arguments(case, device, resets=0)
            a["cache"].entries[2].mul_(factor)
            results.append(run(a, name, device))
        assert_close(results[1], results[0], 1e-5)


def test_launches():
    """A cache of one row fills the device as far as it has tokens; many rows are not split."""
    x = torch.empty(0, dtype=torch.bfloat16)
    with assumed(GPUS["H200"]):
        small, large = (launches_of(1, 16, 16, 64, 64, size, x, False) for size in (1280, 65536))
        assert (small.rows, small.block, small.splits, large.splits) == (1, 64, 32, 32)
        assert launches_of(1, 16, 16, 64, 64, 100, x, False).splits == 2
        assert launches_of(64, 16, 16, 64, 64, 65536, x, False).splits == 1
        latent = launches_of(1, 16, 1, 576, 512, 65536, x, True)
        assert (latent.rows, latent.splits, latent.warps) == (16, 128, 4)
        assert launches_of(1, 64, 1, 576, 512, 65536, x, True)[::3] == (32, 8)
        assert launches_of(1, 8, 2, 64, 64, 1280, x.float(), False).rows == 1


@pytest.mark.parametrize("why", ["deterministic", "another layout", "a long key", "fp64"])
def test_other_calls_run_in_pytorch(why: str):
    case = Case((3, 9), 12, 1, 1, 1030 if why == "a long key" else 8, 8)
    a, b = arguments(case), arguments(case)
    if why == "another layout":
        k, v = a["cache"].entries
        a["cache"] = a["cache"]._replace(entries=(k, v.transpose(0, 1).contiguous().transpose(0, 1)))
    if why == "fp64":
        a["cache"] = a["cache"]._replace(entries=tuple(x.double() for x in a["cache"].entries))
    with kernels.deterministic(why == "deterministic"), dry_run() as record:
        o, *_ = run(a, "auto")
    assert not record.launches
    assert_close((o,), run(b, "reference")[:1], 1e-5)
    if why in ("another layout", "a long key"):
        with pytest.raises(kernels.UserError, match="window_attention_token cannot run on 'triton'"):
            run(a, "triton")


def test_all_is_cast_to_the_cache():
    case = Case((3, 9), 12, dtype=torch.bfloat16)
    a, wide = arguments(case), arguments(case)
    wide["cache"] = wide["cache"]._replace(entries=tuple(x.float() for x in wide["cache"].entries))
    o, exact = run(a, "triton")[0], run(wide, "triton")[0]
    assert o.dtype == exact.dtype == torch.bfloat16
    torch.testing.assert_close(o, exact, rtol=2e-2, atol=1e-2)


class Ops(NamedTuple):
    """Sizes of the `AttentionOps` of a case; 0 pairs turn nothing."""

    pairs: int = 0
    last: bool = False
    norm: tuple[float, ...] = ()  # what is added to the weights of the norms of query and key, and ε; () for no norms
    weightless: bool = False
    gate: str | None = None
    raw: bool = False  # whether log decays are raw gates
    rest: bool = False  # whether the last channels of the query are elsewhere
    position: int = 3000


WITH_OPS = {
    "half": (Case((60, 0), 64, 2, 2, 32, 32), Ops(16)),
    "partial": (Case((5, 60), 64, 4, 2, 64, 64), Ops(8, position=123_457, gate="channel")),
    "last": (Case((5, 60), 64, 2, 1, 64, 16), Ops(8, last=True, norm=(0.0, 1e-6))),
    "96": (Case((60, 9), 64, 2, 2, 96, 64), Ops(48, norm=(1.0, 1e-6), gate="head")),
    "96 partial": (Case((60, 9), 64, 4, 2, 96, 64, dtype=torch.bfloat16), Ops(40, norm=(0.0, 1e-6), gate="head")),
    "128": (Case((70, 9), 16, 2, 1, 128, 128, window=9), Ops(64, norm=(0.0, 1e-2), weightless=True, gate="channel")),
    "norms alone": (Case((60, 9), 64, 6, 2, 20, 24), Ops(norm=(1.0, 1e-6))),
    "products": (Case((60, 9), 64, 20, 2, 80, 64, dtype=torch.bfloat16), Ops(40, norm=(1.0, 1e-6), gate="head")),
    "products, window": (Case((60, 9), 12, 4, 1, 96, 64, window=12, dtype=torch.float16), Ops(20, last=True)),
    "gates": (Case((60, 9), 64, 4, 2, 32, 32, decay=True), Ops(norm=(0.0, 1e-6), raw=True, gate="head")),
    "gates in bf16": (Case((60, 9), 64, 4, 2, 32, 16, decay=True, dtype=torch.bfloat16), Ops(16, raw=True)),
    "latents": (Case((60, 9), 64, 3, 1, 72, 64, same=True), Ops(4, last=True, norm=(0.0, 1e-6))),
    "latents, products": (
        Case((60, 9), 64, 20, 1, 96, 64, same=True, dtype=torch.bfloat16),
        Ops(16, last=True, norm=(1.0, 1e-6), gate="head", rest=True),
    ),
    "latents, a query in two places": (
        Case((60, 9), 64, 3, 1, 80, 64, same=True),
        Ops(4, last=True, norm=(0.0, 1e-6), rest=True),
    ),
}


def with_ops(name: str, device: str = "cpu") -> dict[str, Any]:
    """Arguments of a case with `ops`, whose positions differ from the numbers of tokens in the cache."""
    (case, sizes), generator = WITH_OPS[name], torch.Generator().manual_seed(1)
    a, B = arguments(case, device, resets=0), len(case.seen)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    def norm(size: int) -> QKNorm:
        offset, eps = sizes.norm
        return QKNorm(size, None if sizes.weightless else 1 - offset + 0.3 * draw(size), eps, offset)

    ops = AttentionOps()
    if sizes.norm:
        k_norm = norm(case.V if case.same else case.D)
        ops = ops._replace(
            q_norm=None if case.same else norm(case.D), k_norm=k_norm, v_norm=k_norm if case.same else None
        )
    if sizes.pairs:
        rates = 1e4 ** -(torch.arange(sizes.pairs, device=device) / sizes.pairs)
        positions = a["cache"].seen + torch.tensor([sizes.position, 1], device=device)
        ops = ops._replace(turn=Turn(positions, rates, 1.3, sizes.last))
    if sizes.gate is not None:
        width = case.H if sizes.gate == "head" else case.H * case.V
        ops = ops._replace(gate=draw(B, 1, width + 3, dtype=case.dtype)[..., :-3])
    if sizes.raw:
        a["log_decay"], ops = draw(B, 1, case.H, dtype=case.dtype), ops._replace(decay_bias=draw(case.H))
    if sizes.rest:
        ops = ops._replace(q_rest=draw(B, 1, case.H, case.D - case.V + 5, dtype=case.dtype)[..., 5:])
        a["q"] = torch.cat([a["q"][..., : case.V], torch.full_like(ops.q_rest, math.nan)], -1)
    return a | {"cache": a["cache"]._replace(ops=ops)}


def one_after_another(a: dict[str, Any]) -> dict[str, Any]:
    """The arguments after their norms, positions and decays, by the formulas, rounded after each."""
    ops, q, dtype = a["cache"].ops, a["q"], a["q"].dtype
    if ops.q_rest is not None:
        q = torch.cat([q[..., : -ops.q_rest.shape[3]], ops.q_rest], -1)

    def normed(x: Tensor, norm: QKNorm | None) -> Tensor:
        if norm is None:
            return x
        y, rest = x[..., : norm.size].float(), x[..., norm.size :]
        scale = 1.0 if norm.weight is None else norm.offset + norm.weight
        return torch.cat([(y * (y.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * scale).to(dtype), rest], -1)

    def turned(x: Tensor, turn: Turn | None) -> Tensor:
        if turn is None:
            return x
        first = x.shape[-1] - 2 * len(turn.rates) if turn.last else 0
        before, middle, after = x.float().tensor_split([first, first + 2 * len(turn.rates)], -1)
        angle = (turn.positions[:, None, None, None].float() * turn.rates).double()
        low, high = middle.double().chunk(2, -1)
        pair = low * angle.cos() - high * angle.sin(), low * angle.sin() + high * angle.cos()
        return torch.cat([before, *(turn.amplitude * x.float() for x in pair), after], -1).to(dtype)

    q, k = turned(normed(q, ops.q_norm), ops.turn), turned(normed(a["k"], ops.k_norm), ops.turn)
    decay = a["log_decay"] if ops.decay_bias is None else logsigmoid(a["log_decay"].float() + ops.decay_bias)
    return {
        **a,
        "q": q,
        "k": k,
        "v": normed(a["v"], ops.v_norm),
        "log_decay": decay,
        "cache": a["cache"]._replace(ops=None),
    }


@pytest.mark.slow
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("name", WITH_OPS)
def test_norms_positions_decays_and_gates_in_the_same_launches(name: str, device: str):
    """For three tokens in a row, and the same in PyTorch."""
    case, tolerance = WITH_OPS[name][0], 5 * TOLERANCE[WITH_OPS[name][0].dtype]
    a, plain, composed = (with_ops(name, device) for _ in range(3))
    for _ in range(3):
        expected = run(one_after_another(plain), "reference", device)
        if (gate := plain["cache"].ops.gate) is not None:
            o = expected[0].flatten(2) if gate.shape[2] > case.H else expected[0]
            factor = gate.sigmoid() if gate.shape[2] > case.H else gate.sigmoid()[..., None]
            expected = ((o * factor).view(expected[0].shape), *expected[1:])
        with dry_run() as record:
            run(with_ops(name, device), "triton", device)
        assert [launch.name.split(".")[-1] for launch in record.launches] == ["attend_to_part", "add_newest"]
        for b, backend in ((a, "triton"), (composed, "torch")):
            o, *written = run(b, backend, device)
            assert o.dtype == case.dtype
            for x, y in zip((o, *written), expected, strict=True):
                torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
        for b in (a, plain, composed):
            cache, ops = b["cache"], b["cache"].ops
            if ops.turn is not None:
                ops = ops._replace(turn=ops.turn._replace(positions=ops.turn.positions + 1))
            b["cache"] = KeyCache(cache.entries, cache.following, torch.empty_like(cache.seen), ops)
            b["q"], b["k"], b["v"] = (x.flip(0) for x in (b["q"], b["k"], b["v"]))
            if case.same:
                b["v"] = b["k"][..., : case.V]


@pytest.mark.parametrize(
    "why", ["another dtype", "values alone", "a query in two places", "many rows", "autocast", "deterministic"]
)
def test_what_the_launches_do_not_compute_comes_before_and_after_them(why: str, monkeypatch: pytest.MonkeyPatch):
    a, b = with_ops("96"), with_ops("96")
    if why == "many rows":
        monkeypatch.setattr(token, "MOST_TURNED", 1)
    for x in (a, b):
        cache, ops = x["cache"], x["cache"].ops
        if why == "another dtype":
            cache = cache._replace(entries=tuple(entry.bfloat16() for entry in cache.entries))
        if why == "values alone":
            ops = ops._replace(v_norm=QKNorm(64, None, 1e-6))
        if why == "a query in two places":
            ops = ops._replace(q_rest=x["q"][..., -5:].clone())
            x["q"] = torch.cat([x["q"][..., :-5], torch.full_like(x["q"][..., -5:], math.nan)], -1)
        x["cache"] = cache._replace(ops=ops)
    gate = b["cache"].ops.gate
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast")
    with kernels.deterministic(why == "deterministic"), autocast, kernels.implementations() as ran:
        o, *written = run(a, "triton" if why != "deterministic" else "auto")
    assert "rotary" in ran
    assert ("activation_gate" in ran) is (why != "many rows")
    expected, *entries = run(one_after_another(b), "reference")
    expected = expected if gate is None else expected * gate.sigmoid()[..., None]
    tolerance = 3e-2 if why in ("another dtype", "autocast") else 1e-5
    torch.testing.assert_close(o.float(), expected.float(), rtol=tolerance, atol=tolerance)
    for x, y in zip(written, entries, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def shorter(a: dict[str, Any], number: int) -> KeyCache:
    entries = list(a["cache"].entries)
    entries[number] = entries[number][:, :-1]
    return a["cache"]._replace(entries=tuple(entries))


MISFITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "cache: expected one token of each row": lambda a: a.update({n: a[n].repeat(1, 2, 1, 1) for n in "qkv"}),
    "cache: expected one token of each row, without": lambda a: a.update(first_key=torch.zeros(3, dtype=torch.int64)),
    "cache: expected 3 entries, as there are new ones, got 2": lambda a: a.update(log_decay=torch.zeros(3, 1, 2)),
    r"cache.seen: expected an int64 \[3\] on cpu, got torch.int32": lambda a: a.update(
        cache=a["cache"]._replace(seen=a["cache"].seen.int())
    ),
    r"cache.following: expected an int64 \[3\] on cpu, got torch.int64 \(2,\)": lambda a: a.update(
        cache=a["cache"]._replace(following=a["cache"].seen[:2])
    ),
    "cache.seen: must be a tensor, got a list": lambda a: a.update(cache=a["cache"]._replace(seen=[0, 1, 2])),
    r"cache.entries\[1\]: expected floats \[3, 20, 2, 8\] on cpu, got": lambda a: a.update(cache=shorter(a, 1)),
    r"cache.entries\[0\]: expected floats \[3, 1, 2, 8\] on cpu, got": lambda a: a.update(
        cache=KeyCache((torch.zeros(3, 0, 2, 8),) * 2, a["cache"].seen)
    ),
    "cache: has keys in torch.float32, but values in torch.float16": lambda a: a.update(
        cache=KeyCache((a["cache"].entries[0], a["cache"].entries[1].half()), a["cache"].seen)
    ),
}


MISFITS_OF_OPS: dict[str, Callable[[AttentionOps], AttentionOps]] = {
    "q_norm: expected 1 to 96 channels, and a weight for each": lambda ops: ops._replace(q_norm=QKNorm(97, None, 1e-6)),
    "k_norm: expected 1 to 96 channels, and a weight for each": lambda ops: ops._replace(
        k_norm=QKNorm(96, torch.ones(95), 1e-6)
    ),
    "v_norm: expected 1 to 64 channels": lambda ops: ops._replace(v_norm=QKNorm(96, None, 1e-6)),
    r"turn: expected positions \[2\] and rates of 1 to 48 pairs": lambda ops: ops._replace(
        turn=ops.turn._replace(rates=torch.zeros(49))
    ),
    r"turn: expected positions \[2\] and": lambda ops: ops._replace(turn=ops.turn._replace(positions=torch.zeros(3))),
    r"q_rest: expected \[2,1,2, below 96\], got shape \(2, 1, 2, 96\)": lambda ops: ops._replace(
        q_rest=torch.zeros(2, 1, 2, 96)
    ),
    "decay_bias: expected raw gates": lambda ops: ops._replace(decay_bias=torch.zeros(2)),
    r"gate: expected \[2,1,2\] or \[2,1,128\], got shape \(2, 1, 3\)": lambda ops: ops._replace(
        gate=torch.zeros(2, 1, 3)
    ),
}


@pytest.mark.parametrize("said", MISFITS_OF_OPS)
def test_misfits_of_ops(said: str):
    a = with_ops("96")
    with pytest.raises(ValueError, match=f"^cache.ops.{said}"):
        run(a | {"cache": a["cache"]._replace(ops=MISFITS_OF_OPS[said](a["cache"].ops))}, "torch")


SHARED: dict[str, Callable[[AttentionOps], AttentionOps]] = {
    "v_norm: must be k_norm": lambda ops: ops._replace(v_norm=None),
    "turn: must not turn the first 64 channels": lambda ops: ops._replace(turn=ops.turn._replace(last=False)),
    "turn: must not turn": lambda ops: ops._replace(turn=ops.turn._replace(rates=torch.zeros(5))),
}


@pytest.mark.parametrize("said", SHARED)
def test_keys_and_values_in_the_same_memory_stay_alike(said: str):
    a = with_ops("latents")
    with pytest.raises(ValueError, match=f"^cache.ops.{said}"):
        run(a | {"cache": a["cache"]._replace(ops=SHARED[said](a["cache"].ops))}, "torch")


def test_a_query_in_two_places_needs_a_positive_scale():
    a = with_ops("latents, a query in two places")
    with pytest.raises(ValueError, match=r"^cache.ops.q_rest: needs a scale above 0, got -1.0"):
        run(a | {"scale": -1.0}, "torch")


@pytest.mark.parametrize("said", MISFITS)
def test_misfits(said: str):
    a = arguments(Case())
    MISFITS[said](a)
    with pytest.raises(ValueError, match=f"^{said}"):
        run(a, "torch")


def test_there_are_no_gradients():
    a = arguments(Case())
    with pytest.raises(ValueError, match=r"^cache: is written in place, and has no gradients"):
        kernels.window_attention(**a | {"q": a["q"].requires_grad_()})
    ops = AttentionOps(q_norm=QKNorm(8, torch.ones(8, requires_grad=True), 1e-6))
    with pytest.raises(ValueError, match=r"^cache: is written in place, and has no gradients"):
        kernels.window_attention(**a | {"cache": a["cache"]._replace(ops=ops)})


LARGE = [
    Case((1024,), 1280, 16, 16, 64, 64, dtype=torch.bfloat16),
    Case((1024,), 1280, 8, 8, 128, 128, decay=True, dtype=torch.bfloat16),
    Case((5000,), 2048, 16, 16, 64, 64, window=2048, dtype=torch.bfloat16),
    Case((20_000,), 20_480, 8, 8, 128, 128, dtype=torch.bfloat16),
    Case(tuple(range(0, 640, 10)), 700, 16, 4, 64, 64, dtype=torch.float16),
    Case((0, 700, 1023), 1024, 16, 4, 128, 128, decay=True, dtype=torch.bfloat16),
    Case((1000, 31), 1024, 8, 2, 256, 256, decay=True, dtype=torch.float16),
    Case((1000, 31), 1024, 4, 4, 256, 256),
    Case((1000, 31), 1024, 6, 2, 96, 80, decay=True),
    Case((4000,), 4096, 16, 1, 576, 512, same=True, dtype=torch.bfloat16),
    Case((900, 0, 899), 1024, 32, 1, 576, 512, same=True, dtype=torch.bfloat16),
    Case((900, 0, 899), 1024, 64, 1, 576, 512, same=True, dtype=torch.float16),
    Case((900, 0), 1024, 8, 1, 320, 256, same=True, dtype=torch.bfloat16),
    Case((900, 0), 1024, 8, 1, 320, 256, same=True),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE)
def test_on_device(case: Case):
    """A token is PyTorch's in fp32, and equal calls have equal bits."""
    a = arguments(case, "cuda", resets=0.002)
    exact = {n: a[n] if a[n] is None else a[n].float() for n in ("q", "k", "v", "log_decay")}
    entries = tuple(x.float() for x in a["cache"].entries)
    expected = run({**a, **exact, "cache": a["cache"]._replace(entries=entries)}, "torch", "cuda")
    o, *written = run(arguments(case, "cuda", resets=0.002), "triton", "cuda")
    assert_close((o.float(), *(x.float() for x in written)), expected, TOLERANCE[case.dtype])
    for _ in range(20):
        assert torch.equal(run(arguments(case, "cuda", resets=0.002), "triton", "cuda")[0], o)
