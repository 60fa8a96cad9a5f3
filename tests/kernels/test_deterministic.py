"""In deterministic mode rows have the bits that they have alone: products, functions, attention, all ops."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.core import elementwise
from kernels.window_attention import aligned, candidates, decay, reference
from kernels.window_attention.arguments import check
from reproductions.proofs import ops
from tests.kernels.places import PLACES

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def product(x: Tensor, weight: Tensor, bias: Tensor | None, dy: Tensor) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in (x, weight, bias) if leaf is not None]
    y = kernels.linear(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("I", "O", "bias"), [(40, 70, True), (130, 33, False), (72, 136, True)])
def test_products(I: int, O: int, bias: bool, dtype: torch.dtype, backend: str, device: str):
    generator = torch.Generator().manual_seed(0)
    x, weight, b = (torch.randn(shape, generator=generator) for shape in ((7, 19, I), (O, I), (O,)))
    dy = torch.randn(7, 19, O, generator=generator)
    x, weight, b, dy = (z.to(device, dtype) for z in (x, weight / I**0.5, b, dy))
    added = b if bias else None
    with kernels.backend(backend):
        expected = product(x, weight, added, dy)
        with kernels.deterministic():
            actual = product(x, weight, added, dy)
            for rows in (slice(0, 1), slice(2, 5)):
                y, dx, *_ = product(x[rows], weight, added, dy[rows])
                assert torch.equal(y, actual[0][rows])
                assert torch.equal(dx, actual[1][rows])
            one = kernels.linear(x[3, 5], weight, added)  # of a single token
            assert torch.equal(one, actual[0][3, 5])
    for y, z in zip(actual, expected, strict=True):
        assert float((y.float() - z.float()).norm() / z.float().norm()) < ROUNDING[dtype]


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_products_of_heads(backend: str, device: str):
    x, weight = torch.randn(3, 20, 2, 16, device=device), torch.randn(2, 16, 24, device=device)
    with kernels.backend(backend), kernels.deterministic():
        y = kernels.head_linear(x, weight)
        assert torch.equal(kernels.head_linear(x[1:2], weight), y[1:2])
    torch.testing.assert_close(y, torch.einsum("bthk,hkn->bthn", x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", PLACES)
def test_an_autocast_product_has_the_dtype_of_autocast(device: str):
    x, weight = torch.randn(3, 5, 16, device=device), torch.randn(8, 16, device=device)
    with torch.autocast(device, torch.bfloat16), kernels.deterministic():
        assert kernels.linear(x, weight).dtype == F.linear(x, weight).dtype == torch.bfloat16


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sigmoid": (elementwise.sigmoid, torch.sigmoid),
    "silu": (elementwise.silu, F.silu),
    "softplus": (elementwise.softplus, F.softplus),
    "elu": (elementwise.elu, F.elu),
    "exp2": (elementwise.exp2, torch.exp2),
    "rsqrt": (lambda x: elementwise.rsqrt(x.abs()), lambda x: x.abs().rsqrt()),
    "logaddexp": (
        lambda x: elementwise.logaddexp(x, torch.ones_like(x)),
        lambda x: torch.logaddexp(x, torch.ones_like(x)),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_functions_do_not_depend_on_the_place(name: str):
    function, expected = FUNCTIONS[name]
    x = torch.cat([torch.randn(200, generator=torch.Generator().manual_seed(0)) * 4, torch.tensor([-90.0, 60.0])])

    def results(x: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        return y.detach(), torch.autograd.grad(y.sum(), leaf)[0]

    with kernels.deterministic():
        y, dy = results(x)
        for i in range(len(x)):
            one, done = results(x[i : i + 1])
            assert torch.equal(one, y[i : i + 1])
            assert torch.equal(done, dy[i : i + 1])
    torch.testing.assert_close(y, expected(x), rtol=1e-5, atol=1e-6)
    assert bool(dy.isfinite().all())


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_to_the_loop_and_from_a_cache(groups: int, window: int | None, device: str):
    q, k, v = (torch.randn(2, 130, heads, 16, device=device) for heads in (2 * groups, 2, 2))

    def attend(q: Tensor, k: Tensor, v: Tensor, first: Tensor | None = None) -> Tensor:
        return kernels.window_attention(q, k, v, window_size=window, first_key=first)

    with kernels.deterministic():
        o = attend(q, k, v)
        for end in (1, 63, 65):
            assert torch.equal(attend(q[:1, :end], k[:1, :end], v[:1, :end]), o[:1, :end])
        # the second row's cache has 64 keys and as many empty places
        padded = [torch.cat([x.new_full((1, 64, *x.shape[2:]), 9.0), x[1:, :66]], 1) for x in (k, v)]
        both = [torch.cat([x[:1], y]) for x, y in zip((k, v), padded, strict=True)]
        queries = torch.cat([q[:1, 128:], q[1:, 64:66]])
        cached = attend(queries, *both, torch.tensor([0, 64], device=device))
        assert torch.equal(cached[0], o[0, 128:])
        assert torch.equal(cached[1], o[1, 64:66])
        assert candidates.chosen(check(q, k, v, window, None, None, None)) == "aligned"
    torch.testing.assert_close(o, reference.forward(check(q, k, v, window, None, None, None)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("decays", [False, True])
def test_attention_of_queries_without_a_key(decays: bool, window: int | None, device: str):
    """The first valid key may come after the first query, after the last key, or before the first place."""
    lengths, heads = (70, 80, 80), (4, 2, 2)
    q, k, v = (torch.randn(6, T, H, 8, device=device) for T, H in zip(lengths, heads, strict=True))
    log_decay = -torch.rand(6, 80, 4, device=device) if decays else None
    first = torch.tensor([0, 10, 11, 79, 80, -3], device=device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with kernels.deterministic():
        o = kernels.window_attention(q, k, v, window_size=window, first_key=first, log_decay=log_decay)
    expected = reference.forward(check(q, k, v, window, first, None, None, log_decay))
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    for actual, wanted in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (o, expected)), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
@pytest.mark.parametrize("window", [None, 7])
def test_attention_with_the_products_of_a_gpu(window: int | None, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(aligned, "implementation", lambda x: "triton")
    leaves = [torch.randn(3, 130, heads, 16).requires_grad_() for heads in (4, 2, 2)]
    with kernels.deterministic():
        o = kernels.window_attention(*leaves, window_size=window)
        one = kernels.window_attention(*(x[1:2] for x in leaves), window_size=window)
        gradients = torch.autograd.grad(o.square().sum(), leaves, retain_graph=True)
        of_one = torch.autograd.grad(one.square().sum(), leaves)
    # autograd's thread of a GPU is not in the mode, which what is recomputed there follows nevertheless
    outside = torch.autograd.grad(o.square().sum(), leaves)
    assert all(map(torch.equal, outside, gradients))
    assert torch.equal(one, o[1:2])
    assert all(torch.equal(x[1:2], y[1:2]) for x, y in zip(of_one, gradients, strict=True))
    expected = reference.forward(check(*leaves, window, None, None, None))
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected.square().sum(), leaves), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("decays", [False, True])
def test_gradients_of_attention_do_not_depend_on_the_batch(decays: bool, device: str):
    leaves = [torch.randn(5, 130, heads, 16, device=device).requires_grad_() for heads in (4, 2, 2)]
    if decays:
        log_decay = -torch.rand(5, 130, 4, device=device)
        leaves.append(log_decay.masked_fill(log_decay < -0.98, -torch.inf).requires_grad_())

    def gradients(rows: slice) -> tuple[Tensor, ...]:
        q, k, v, *rest = (x[rows] for x in leaves)
        with kernels.deterministic():
            o = kernels.window_attention(q, k, v, log_decay=rest[0] if rest else None)
        return torch.autograd.grad(o.square().sum(), leaves)

    for x, y in zip(gradients(slice(None)), gradients(slice(1, 2)), strict=True):
        assert torch.equal(x[1], y[1])


def test_gradients_of_decays_are_summed_in_the_mode_of_the_call(monkeypatch: pytest.MonkeyPatch):
    modes = []

    def cumulated(x: Tensor, dim: int, mode: bool) -> Tensor:
        modes.append(mode)
        return x.cumsum(dim)

    monkeypatch.setattr(decay, "cumulated", cumulated)
    x, log_decay = torch.randn(2, 9, 1, 4), -torch.rand(2, 9, 1)
    log_decay[:, 3] = -torch.inf
    log_decay.requires_grad_()
    with kernels.deterministic():
        o = kernels.window_attention(x, x, x, log_decay=log_decay)
    torch.autograd.grad(o.sum(), log_decay)
    assert modes == [True]


def test_attention_without_rows():
    x, first = torch.zeros(0, 5, 1, 4, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    with kernels.deterministic():
        o = kernels.window_attention(x, x, x, first_key=first)
    assert o.shape == x.shape
    assert torch.autograd.grad(o.sum(), x)[0].shape == x.shape


def test_a_closed_gate_without_a_lower_bound():
    closed = torch.tensor([[-torch.inf]])
    with kernels.deterministic():
        assert kernels.forget_gate(closed, None, closed[0]).item() == -torch.inf


@pytest.mark.slow
def test_rows_and_documents_of_every_op():
    every_op("cpu")


@pytest.mark.gpu
def test_rows_and_documents_of_every_op_on_a_gpu():
    every_op("cuda")


def every_op(device: str) -> None:
    subjects = [each for each in ops.subjects(torch.device(device)) if "invariant" in ops.proofs(each)]
    assert len({each.case.op for each in subjects}) > 10
    findings = [ops.invariant(each) for each in subjects]
    assert [str(each) for each in findings if each.says != "exact"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("op", "gate"), [(op, gate) for op in ("linear_recurrence", "delta_rule") for gate in ("head", "channel")]
)
def test_long_rows_and_pieces_on_a_gpu(op: str, gate: str, dtype: torch.dtype):
    """Rows that would be cut into segments, and pieces that begin at chunks."""
    B, T, H, D = 4, 8192 + 64, 2, 128 if dtype == torch.bfloat16 else 64
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(B, T, H, D, device="cuda", generator=generator).to(dtype) for _ in range(3))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    shape = (B, T, H, D) if gate == "channel" else (B, T, H)
    log_decay = F.logsigmoid(torch.randn(shape, device="cuda", generator=generator)) / 16
    beta = {} if op == "linear_recurrence" else {"beta": torch.rand(B, T, H, device="cuda", generator=generator)}
    inputs = {"q": q, "k": k, "v": v, "log_decay": log_decay, **beta}

    def run(inputs: dict[str, Tensor], state: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
        o, last = getattr(kernels, op)(**leaves, initial_state=state, return_state=True)
        return o.detach(), last.detach(), [*torch.autograd.grad(o.float().square().sum(), [*leaves.values()])]

    with kernels.deterministic():
        o, last, gradients = run(inputs)
        one, end, of_one = run({name: x[1:2] for name, x in inputs.items()})
        assert torch.equal(one, o[1:2])
        assert torch.equal(end, last[1:2])
        for x, y in zip(of_one, gradients, strict=True):
            assert torch.equal(x, y[1:2])
        state, outputs = None, []
        for start, stop in ((0, 64), (64, 640), (640, T)):
            piece, state, _ = run({name: x[:, start:stop] for name, x in inputs.items()}, state)
            outputs.append(piece)
        assert torch.equal(torch.cat(outputs, 1), o)
        assert torch.equal(state, last)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("window", [100, 130, 200, 256])
def test_documents_shorter_than_a_window(window: int, device: str):
    """Blocks have the shapes of the document alone, although the row of all of them is longer than the window."""
    bounds, streams = [0, 200, 230, 430], [torch.randn(1, 430, 2, 16, device=device) for _ in range(4)]

    def results(start: int, stop: int, packed: torch.Tensor | None) -> list[torch.Tensor]:
        *inputs, do = (x[:, start:stop].detach().requires_grad_() for x in streams)
        with kernels.deterministic():
            o = kernels.window_attention(*inputs, window_size=window, cu_seqlens=packed)
            return [o, *torch.autograd.grad(o, inputs, do)]

    whole = results(0, 430, torch.tensor(bounds, dtype=torch.int32, device=device))
    for start, stop in zip(bounds, bounds[1:], strict=False):
        alone = results(start, stop, None)
        assert all(torch.equal(x[:, start:stop], y) for x, y in zip(whole, alone, strict=True))


@pytest.mark.parametrize("decaying", [False, True])
def test_values_of_one_channel_in_a_batch(decaying: bool):
    q, k, v = torch.randn(5, 70, 1, 8), torch.randn(5, 70, 1, 8), torch.randn(5, 70, 1, 1)
    log_decay = -torch.rand(5, 70, 1) if decaying else None
    with kernels.deterministic():
        o = kernels.window_attention(q, k, v, log_decay=log_decay)
        for row in range(5):
            one = slice(row, row + 1)
            decays = None if log_decay is None else log_decay[one]
            assert torch.equal(kernels.window_attention(q[one], k[one], v[one], log_decay=decays), o[one])
