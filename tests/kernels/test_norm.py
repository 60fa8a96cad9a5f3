import itertools

import pytest
import torch
from torch import Tensor

import kernels
from kernels.norm import add_layer_norm, layer_norm


def by_hand(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    return y if weight is None else y * weight


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_rms_norm(eps: float, weighted: bool, backend: str):
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    weight = torch.randn(7, dtype=torch.float64) if weighted else None
    with kernels.backend(backend):
        torch.testing.assert_close(kernels.rms_norm(x, weight, eps), by_hand(x, weight, eps))


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_rms_norm(activation: str, gate_first: bool, weighted: bool, backend: str):
    x, gate = torch.randn(2, 2, 3, 7, dtype=torch.float64)
    weight = torch.randn(7, dtype=torch.float64) if weighted else None
    opened = torch.sigmoid(gate) if activation == "sigmoid" else gate * torch.sigmoid(gate)
    expected = by_hand(x * opened, weight, 0.1) if gate_first else by_hand(x, weight, 0.1) * opened
    with kernels.backend(backend):
        y = kernels.gated_rms_norm(x, gate, weight, 0.1, gate_first=gate_first, activation=activation)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_layer_norm(backend: str):
    x, y = torch.randn(2, 2, 3, 7, dtype=torch.float64)
    weight, bias = torch.randn(2, 7, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True)
    with kernels.backend(backend):
        torch.testing.assert_close(layer_norm(x, weight, bias, 0.1), by_hand(centred, weight, 0.1) + bias)
        total, normed = add_layer_norm(x, y, weight, bias, 0.1)
        torch.testing.assert_close(total, x + y)
        torch.testing.assert_close(normed, layer_norm(x + y, weight, bias, 0.1))


@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gradients(activation: str, gate_first: bool):
    x, gate = torch.randn(2, 4, 5, dtype=torch.float64)
    weight = torch.randn(5, dtype=torch.float64)
    arguments = [t.requires_grad_() for t in (x.clone(), gate.clone(), weight)]
    how = {"gate_first": gate_first, "activation": activation}
    assert torch.autograd.gradcheck(lambda *a: kernels.gated_rms_norm(*a, **how), arguments)


def test_bf16_is_computed_in_fp32():
    # the result is the fp32 one, rounded once
    x, gate, weight = torch.randn(4, 64).bfloat16(), torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    exact = [t.float() for t in (x, gate, weight)]
    assert torch.equal(kernels.rms_norm(x, weight), kernels.rms_norm(exact[0], exact[2]).bfloat16())
    for first, activation in itertools.product((True, False), ("silu", "sigmoid")):
        how = {"gate_first": first, "activation": activation}
        actual = kernels.gated_rms_norm(x, gate, weight, **how)
        assert torch.equal(actual, kernels.gated_rms_norm(*exact, **how).bfloat16())


def test_weights_may_have_another_dtype():
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(8)
    assert kernels.rms_norm(x, weight).dtype == torch.bfloat16
    x = torch.randn(4, 8, dtype=torch.float64)
    assert kernels.gated_rms_norm(x, x, weight).dtype == torch.float64


def test_zeros_stay_zero():
    x = torch.zeros(2, 8, requires_grad=True)
    y = kernels.rms_norm(x)
    y.sum().backward()
    assert not y.any()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_a_single_vector(gated: bool):
    x, weight = torch.randn(8).requires_grad_(), torch.randn(8).requires_grad_()
    y = [kernels.gated_rms_norm(z, z, weight) if gated else kernels.rms_norm(z, weight) for z in (x, x[None])]
    for actual, expected in zip(*(torch.autograd.grad(z.square().sum(), [x, weight]) for z in y), strict=True):
        torch.testing.assert_close(actual, expected)


def test_errors_name_the_argument():
    x = torch.zeros(2, 8)
    for wrong in (x.long(), x[0, 0]):
        with pytest.raises(ValueError, match=r"^x: expected a floating"):
            kernels.rms_norm(wrong)
    with pytest.raises(ValueError, match=r"^weight: "):
        kernels.rms_norm(x, torch.ones(1))
    with pytest.raises(ValueError, match=r"^weight: "):
        kernels.gated_rms_norm(x, x, torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"^bias: expected \[8\]"):
        layer_norm(x, torch.ones(8), torch.ones(7))
    with pytest.raises(ValueError, match=r"^gate: "):
        kernels.gated_rms_norm(x, x[0])
    with pytest.raises(ValueError, match=r"^activation: 'tanh' is not one of silu, sigmoid$"):
        kernels.gated_rms_norm(x, x, activation="tanh")
