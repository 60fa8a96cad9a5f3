"""Products with fixed tiles in Gluon: step by step without a GPU, and on Hopper against fp32."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from kernels.gpu.paths import dry_run

pytest.importorskip("triton")
from kernels.linear.gpu import tiles

from .gluon_interpreter import interpreted
from .hopper import MOST, shared_memory

HOPPER = "kernels.linear.gpu.hopper"


def matrix(rows: int, columns: int, by_columns: bool) -> Tensor:
    return torch.randn(columns, rows).double().T if by_columns else torch.randn(rows, columns).double()


# programs without a tile, with one or more; sizes that are not whole tiles or steps; a sum in one part, and in two
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
@pytest.mark.parametrize("programs", [1, 3, 9])
@pytest.mark.parametrize(("M", "K", "N"), [(1, 8, 8), (300, 72, 136), (40, 2100, 24)])
def test_step_by_step(M: int, K: int, N: int, programs: int, monkeypatch: pytest.MonkeyPatch):
    module: Any = interpreted(HOPPER, "product_tiles")
    monkeypatch.setattr(module, "multiprocessors", lambda device: programs)
    parts = []
    monkeypatch.setattr(module, "new", lambda like, *shape, dtype: parts.append(shape) or torch.full(shape, torch.nan))
    for of_a, of_b, divide in product((False, True), repeat=3):
        a, b, y = matrix(M, K, of_a), matrix(K, N, of_b), torch.full((M, N + 8), torch.nan).double()
        module.multiply(a, b, y[:, :N], divide=divide)
        close = {"rtol": 1e-5, "atol": 1e-4} if parts else {"rtol": 1e-12, "atol": 1e-12}  # parts are fp32
        torch.testing.assert_close(y[:, :N], a @ b, **close)
        assert bool(y[:, N:].isnan().all())
        assert parts == ([(2, M, N)] if divide and K == 2100 and programs > 1 else [])
        parts.clear()


def test_parts_of_a_sum(monkeypatch: pytest.MonkeyPatch):
    module: Any = interpreted(HOPPER, "product_tiles")
    assert module.parts_of(tiles=32, steps=256, programs=132) == 4  # 128 programs with 64 steps, instead of 32 with 256
    assert module.parts_of(tiles=176, steps=256, programs=132) == 3  # four rounds of 86 steps, instead of two of 256
    assert module.parts_of(tiles=528, steps=256, programs=132) == 1
    assert module.parts_of(tiles=1792, steps=256, programs=132) == 1  # parts would take more time than they save
    assert module.parts_of(tiles=1, steps=20, programs=132) == 1  # too short


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a_turned", "b_turned", "divided"), [(False, True, False), (False, False, False), (True, False, True)]
)
def test_shared_memory(a_turned: bool, b_turned: bool, divided: bool):
    from triton.experimental.gluon.language import NVMMASharedLayout

    layout = repr(NVMMASharedLayout(128, 16, 2))
    tall, wide = f"tensordesc<bf16[128, 64],{layout}>", f"tensordesc<bf16[64, 128],{layout}>"
    types = {"y": "*fp32" if divided else "*bf16", "a": wide if a_turned else tall, "b": tall if b_turned else wide}
    fixed = {"y_row": 1024, "N": 1024, "A_TURNED": a_turned, "B_TURNED": b_turned, "DIVIDED": divided}
    numbers = {"M": "i32", "steps": "i32", "parts": "i32"}
    assert shared_memory(HOPPER, "product_tiles", fixed, types | numbers, warps=4) <= MOST


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ({}, True),
        ({"M": 1}, True),
        ({"M": 25, "K": 72}, True),
        ({"M": 0}, False),
        ({"K": 60}, False),
        ({"N": 36}, False),
        ({"dtype": torch.float32}, False),
        ({"H": 2}, False),
        ({"divide": True, "K": 61}, True),
        ({"divide": True, "M": 25}, False),
    ],
)
def test_what_it_takes(change: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch):
    """The sizes decide, and how the factors are stored does not: a row may be stored otherwise alone."""
    monkeypatch.setattr(tiles, "runs_gluon", lambda device: True)
    of = {"H": 1, "M": 24, "K": 64, "N": 40, "dtype": torch.bfloat16, "divide": False} | change
    a, b, y = (torch.empty(of["H"], of[r], of[c], dtype=of["dtype"]) for r, c in ("MK", "KN", "MN"))
    for stored in (a, torch.empty(of["H"], of["K"], of["M"], dtype=of["dtype"]).mT):
        assert tiles.HOPPER.when(tiles.Product(stored, b, y, of["divide"])) == taken


def test_factors_are_copied_where_their_rows_do_not_begin_at_16_bytes():
    module: Any = interpreted(HOPPER, "product_tiles")
    x = torch.arange(16.0 * 24).view(16, 24)
    assert module.fitting(x, by_columns=False) is x
    assert module.fitting(x.T, by_columns=True).data_ptr() == x.data_ptr()
    one, odd = x[:1].as_strided((1, 24), (3, 1)), x.flatten()[:320].view(16, 20)
    for y, columns in ((x.T, False), (one, False), (odd.T, True), (x[:1, :1].expand(24, 1), True)):
        copied = module.fitting(y, by_columns=columns)
        assert torch.equal(copied, y)
        assert copied.stride() == ((1, y.shape[0]) if columns else (y.shape[1], 1))


# rows, inputs, outputs: of a 400M model; sizes that are not whole tiles; a long sum
@pytest.mark.gpu
@pytest.mark.parametrize(("M", "I", "O"), [(2048, 1024, 2816), (300, 72, 136), (1, 4096, 264), (16384, 256, 128)])
def test_on_a_device(M: int, I: int, O: int):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    x, weight, dy = (torch.randn(shape, device="cuda").bfloat16() for shape in ((M, I), (O, I), (M, O)))
    leaves = x.requires_grad_(), weight.requires_grad_()

    def results(rows: slice) -> tuple[Tensor, Tensor]:
        y = kernels.linear(x[rows], weight)
        return y.detach(), torch.autograd.grad(y, x, dy[rows])[0][rows]

    with kernels.deterministic():
        y = kernels.linear(*leaves)
        dx, dweight = torch.autograd.grad(y, leaves, dy)
        repeated = [torch.autograd.grad(kernels.linear(*leaves), weight, dy)[0] for _ in range(20)]
        some = [(rows, results(rows)) for rows in (slice(0, 1), slice(M // 3, M // 2 + 1), slice(M - 1, M))]
        with dry_run() as record:
            kernels.linear(*leaves)
        with torch.no_grad():  # then few rows take another kernel, whose tiles are small
            some += [(rows, (kernels.linear(x[rows], weight), dx[rows])) for rows in (slice(0, 1), slice(5, 69))]
    assert tiles.HOPPER in record.paths
    for rows, (part, gradient) in some:
        assert torch.equal(part, y[rows])
        assert torch.equal(gradient, dx[rows])
    assert all(torch.equal(again, dweight) for again in repeated)
    x, weight, dy = (z.detach().float() for z in (x, weight, dy))
    for actual, exact in ((y, x @ weight.T), (dx, dy @ weight), (dweight, dy.T @ x)):
        assert float((actual.float() - exact).norm() / exact.norm()) < 5e-3
