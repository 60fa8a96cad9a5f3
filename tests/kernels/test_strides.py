"""Inputs whose numbers are apart in memory give the results of contiguous ones.

Matrix products of libraries add in another order where the layout is another, so results may differ by rounding.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from zoo.performance.op_calls import OpCall, cases, op_of

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CALLS = {case.name: case for case in cases(8) if "triton" in op_of(case.op).implementations}


RECURRENCES = ("linear_recurrence", "delta_rule", "value_decay_recurrence")


def spread(x: Tensor) -> Tensor:
    """x with another number after each of its own."""
    return torch.stack([x, torch.full_like(x, 77)], -1)[..., 0]


def padded(x: Tensor) -> Tensor:
    """x with other numbers between its rows."""
    return F.pad(x, (0, 3), value=77)[..., :-3]


@pytest.mark.parametrize("layout", [spread, padded])
@pytest.mark.parametrize("name", CALLS)
def test_inputs(name: str, layout: Callable[[Tensor], Tensor]):
    call: OpCall = CALLS[name].on(DEVICE, torch.float32)
    apart = replace(call, inputs={name: layout(x) for name, x in call.inputs.items()})
    if layout is spread and call.op in RECURRENCES:
        with pytest.raises(ValueError, match=r"^[qk]: the last axis must be contiguous, its stride is 2"):
            apart.results("triton")
        return
    contiguous, actual = call.results("triton"), apart.results("triton")
    different = [output for output, y in contiguous.items() if not torch.equal(actual[output], y)]
    if not different:
        return
    exact = call.on(DEVICE, torch.float64)
    kept = {name: call.inputs[name].double() for name in call.kept if name in call.inputs}
    loop = replace(exact, inputs=exact.inputs | kept).results("reference")
    for output in different:
        y = loop[output]
        rounding = (contiguous[output] - y).norm() + 4 * torch.finfo(torch.float32).eps * y.norm()
        assert (actual[output] - y).norm() <= 2 * rounding, output


x, ones = torch.randn(1, 9, 2, 16, device=DEVICE), torch.ones(1, 9, 2, device=DEVICE)
PACKED = {
    "delta_rule": lambda cu: kernels.delta_rule(x, x, x, beta=ones, cu_seqlens=cu)[0],
    "features": lambda cu: kernels.features(x, torch.ones(32, 1, 4, device=DEVICE), cu_seqlens=cu)[0],
    "linear_recurrence": lambda cu: kernels.linear_recurrence(x, x, x, log_decay=-ones, cu_seqlens=cu)[0],
    "selective_scan": lambda cu: kernels.selective_scan(
        x[..., 0], -ones, torch.ones(2, 8, device=DEVICE), x[..., 1, :8], x[..., 0, :8], cu_seqlens=cu
    )[0],
    "token_shift": lambda cu: kernels.token_shift(x[:, :, 0], torch.ones(1, 16, device=DEVICE) / 2, cu_seqlens=cu)[0],
    "value_decay_recurrence": lambda cu: kernels.value_decay_recurrence(x, x, x, -x.abs(), cu_seqlens=cu)[0],
}


@pytest.mark.parametrize("op", PACKED)
def test_boundaries(op: str):
    cu_seqlens = torch.tensor([0, 3, 3, 9], device=DEVICE)
    with kernels.backend("triton"):
        assert torch.equal(PACKED[op](spread(cu_seqlens)), PACKED[op](cu_seqlens))


def test_one_row_without_leading_axes():
    x = torch.randn(8, device=DEVICE)
    with kernels.backend("triton"):
        assert torch.equal(kernels.forget_gate(spread(x)), kernels.forget_gate(x))
