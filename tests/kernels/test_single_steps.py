"""One token: when the state that was given is written to, and when it is not."""

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE

OPS = {
    "delta_rule": [("beta", "none"), ("beta", "constant"), ("beta", "head")],
    "linear_recurrence": [("", "none"), ("", "constant"), ("beta", "head"), ("", "channel")],
}
CASES = [(op, *case) for op, cases in OPS.items() for case in cases]
B, G, R, E, K, V = 2, 2, 2, 2, 8, 12


def arguments(beta: str, gate: str) -> dict[str, Tensor]:
    H, M = G * R, G * R * E
    decays = {"constant": (M,), "head": (B, 1, M), "channel": (B, 1, M, K)}
    a = {
        "q": torch.randn(B, 1, G * E, K),
        "k": torch.nn.functional.normalize(torch.randn(B, 1, G * E, K), dim=-1),
        "v": torch.randn(B, 1, H, V),
        "initial_state": torch.randn(B, M, K, V),
    }
    if beta:
        a["beta"] = torch.rand(B, 1, M)
    if gate in decays:
        a["log_decay"] = -torch.rand(decays[gate])
    return {name: x.to(DEVICE) for name, x in a.items()}


def run(op: str, a: dict[str, Tensor], backend: str, **options) -> tuple[Tensor, Tensor]:
    with kernels.backend(backend):
        return getattr(kernels, op)(**a, subheads=E, return_state=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("op", "beta", "gate"), CASES)
def test_a_consumed_state_is_overwritten(op: str, beta: str, gate: str, backend: str):
    a = arguments(beta, gate)
    before, expected = a["initial_state"].clone(), run(op, a, "reference")
    o, state = run(op, a, backend)
    assert torch.equal(a["initial_state"], before)
    torch.testing.assert_close((o, state), expected)
    o, state = run(op, a, backend, consume_state=True)
    torch.testing.assert_close((o, state), expected)
    assert state.data_ptr() == a["initial_state"].data_ptr()
    o, state = run(op, {name: x for name, x in a.items() if name != "initial_state"}, backend, consume_state=True)
    nothing = {**a, "initial_state": torch.zeros_like(before)}
    torch.testing.assert_close((o, state), run(op, nothing, "reference"))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", ["bf16", "strided", "expanded", "inference"])
def test_a_state_that_cannot_be_written_to_is_only_read(op: str, backend: str, kind: str):
    a = arguments("beta", "head")
    S = a["initial_state"]
    with torch.inference_mode(kind == "inference"):
        a["initial_state"] = {
            "bf16": S.bfloat16(),
            "strided": S.mT.contiguous().mT,
            "expanded": S[:1].expand_as(S),
            "inference": S.clone(),
        }[kind]
    before = a["initial_state"].clone()
    expected = run(op, a | {"initial_state": before.float()}, "reference")
    actual = run(op, a, backend, consume_state=True)
    torch.testing.assert_close(actual, expected)
    assert actual[1].dtype == torch.float32
    assert torch.equal(a["initial_state"], before)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("wanted", ["initial_state", "k"])
def test_where_a_gradient_is_wanted_nothing_is_overwritten(op: str, backend: str, wanted: str):
    a = arguments("beta", "head")
    before = a["initial_state"].clone()
    a[wanted].requires_grad_()
    gradients = []
    for name, options in ((backend, {"consume_state": True}), ("reference", {})):
        o, state = run(op, a, name, **options)
        gradients.append(torch.autograd.grad(o.sum() + state.square().sum(), a[wanted])[0])
        assert torch.equal(a["initial_state"], before)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        _, state = run(op, a, backend, consume_state=True)
    assert state.data_ptr() == a["initial_state"].data_ptr()


@pytest.mark.skipif(DEVICE == "cuda", reason="runs the kernels in the interpreter")
def test_the_ops_are_registered_properly():
    from kernels.linear_recurrence.gpu import step as gpu_step  # noqa: F401

    a = arguments("beta", "head")
    inputs = (a["q"], a["k"], a["v"], a["log_decay"], a["beta"], a["initial_state"], 0.5, E)
    torch.library.opcheck(torch.ops.token_mixer_zoo.linear_recurrence_step, inputs)
