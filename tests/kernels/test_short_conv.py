from itertools import pairwise

import pytest
import torch
from torch import Tensor

import kernels

PACKED = [0, 0, 1, 3, 10, 10, 20, 20]  # documents shorter than the kernel, and empty ones


def loop(x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor) -> Tensor:
    """y_t = bias + Σ_j weight_j · x_{t−W+1+j}, token by token."""
    W = weight.shape[2]
    line = torch.cat([past, x], 1)
    y = torch.stack([sum(line[:, t + j] * weight[:, 0, j] for j in range(W)) for t in range(x.shape[1])], 1)
    return y if bias is None else y + bias


def inputs(T: int, *, B: int = 2, C: int = 5, W: int = 4, bias: bool = True, rows: int | None = None):
    shapes = {"x": (B, T, C), "weight": (C, 1, W), "history": (rows or B, W - 1, C)}
    if bias:
        shapes["bias"] = (C,)
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 20])
def test_against_a_loop(length: int, width: int, bias: bool):
    a = {name: x.requires_grad_() for name, x in inputs(length, W=width, bias=bias).items()}
    y, history = kernels.short_conv(**a, return_history=True)
    expected = loop(a["x"], a["weight"], a.get("bias"), a["history"])
    torch.testing.assert_close(y, expected)
    assert torch.equal(history, torch.cat([a["history"], a["x"]], 1)[:, length:])
    arriving = torch.randn_like(y)
    actual = torch.autograd.grad((y * arriving).sum(), list(a.values()), materialize_grads=True)
    wanted = torch.autograd.grad((expected * arriving).sum(), list(a.values()), materialize_grads=True)
    torch.testing.assert_close(actual, wanted)


def test_history_defaults_to_zeros_and_is_only_given_on_request():
    a = inputs(6)
    y, history = kernels.short_conv(a["x"], a["weight"])
    assert history is None
    torch.testing.assert_close(y, loop(a["x"], a["weight"], None, torch.zeros_like(a["history"])))


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_packed_documents(width: int, given: bool):
    a = inputs(20, B=1, W=width, rows=len(PACKED) - 1)
    past = a.pop("history")
    past = past if given else torch.zeros_like(past)
    x = a.pop("x").requires_grad_()
    y, history = kernels.short_conv(
        x, **a, history=past if given else None, return_history=True, cu_seqlens=torch.tensor(PACKED)
    )
    outputs, tails = [], []
    for n, (i, j) in enumerate(pairwise(PACKED)):
        tail = past[n : n + 1]  # what an empty document keeps
        if j > i:
            out, tail = kernels.short_conv(x[:, i:j], **a, history=tail, return_history=True)
            outputs.append(out)
        tails.append(tail)
    torch.testing.assert_close(y, torch.cat(outputs, 1))
    torch.testing.assert_close(history, torch.cat(tails))
    arriving = torch.randn_like(y)
    actual, expected = (torch.autograd.grad((o * arriving).sum(), x)[0] for o in (y, torch.cat(outputs, 1)))
    torch.testing.assert_close(actual, expected)


def test_dtypes():
    # parameters follow x, and the history keeps the dtype it came in
    a = inputs(6)
    x = a["x"].bfloat16()
    y, history = kernels.short_conv(x, a["weight"], a["bias"], history=a["history"].float(), return_history=True)
    assert (y.dtype, history.dtype) == (torch.bfloat16, torch.float32)
    _, history = kernels.short_conv(x, a["weight"], a["bias"], return_history=True)
    assert history.dtype == torch.bfloat16


def test_inputs_of_another_shape():
    a = inputs(6)
    with pytest.raises(ValueError, match=r"^x: expected \[B,T,C\], got shape \(6, 5\)"):
        kernels.short_conv(a["x"][0], a["weight"])


def test_a_history_per_document():
    a = inputs(6, B=1)
    with pytest.raises(ValueError, match=r"^history: "):
        kernels.short_conv(**a, cu_seqlens=torch.tensor([0, 2, 6]))
