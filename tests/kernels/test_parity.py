"""The recurrences against the naive functions of flash-linear-attention, which compute in fp32."""

from collections.abc import Callable, Mapping
from types import ModuleType

import pytest
import torch
from torch import Tensor

import kernels

from .recurrences import inputs

pytestmark = pytest.mark.parity
TOLERANCE = 2e-6  # relative to the norm of the result: fp32 rounding of both sides
Oracle = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def fla(oracle: Oracle) -> Callable[[str, str], Callable]:
    return lambda family, function: getattr(oracle(f"fla.ops.{family}.naive"), function)


def compare(
    ours: Callable[..., tuple[Tensor, Tensor]],
    theirs: Callable[..., tuple[Tensor, Tensor]],
    arguments: Mapping[str, Tensor],
) -> None:
    """Outputs, final states, and the gradients of all arguments through both."""
    actual = []
    for run in (ours, theirs):
        leaves = {name: x.detach().clone().requires_grad_() for name, x in arguments.items()}
        o, state = run(**leaves)
        generator = torch.Generator().manual_seed(2)
        loss = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in (o, state))
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        actual.append({"o": o, "state": state, **dict(zip(leaves, gradients, strict=True))})
    for name, expected in actual[1].items():
        error = float((actual[0][name] - expected).detach().norm() / expected.detach().norm())
        assert error < TOLERANCE, f"{name}: relative error {error:.2g}"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("form", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"])
@pytest.mark.parametrize("length", [15, 130])
def test_gated_delta_rule(fla, length: int, form: str, scale: float | None, backend: str):
    theirs = fla("gated_delta_rule", form)

    def ours(**a: Tensor):
        with kernels.backend(backend):
            return kernels.delta_rule(**a, scale=scale, return_state=True)

    def as_theirs(log_decay: Tensor, **a: Tensor):
        return theirs(**a, g=log_decay, scale=scale, output_final_state=True)

    compare(ours, as_theirs, inputs(length, correlated=True, dtype=torch.float32))


@pytest.mark.parametrize("length", [15, 130])
def test_delta_rule(fla, length: int):
    theirs = fla("delta_rule", "delta_rule_recurrence")

    def as_theirs(**a: Tensor):  # heads before time
        turned = {name: x if name == "initial_state" else x.transpose(1, 2) for name, x in a.items()}
        o, state = theirs(**turned)
        return o.transpose(1, 2), state

    arguments = inputs(length, gate="none", correlated=True, dtype=torch.float32)
    compare(lambda **a: kernels.delta_rule(**a, return_state=True), as_theirs, arguments)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("form", ["naive_recurrent_simple_gla", "naive_chunk_simple_gla"])
@pytest.mark.parametrize("length", [15, 130])
def test_a_decay_per_head(fla, length: int, form: str, scale: float | None, backend: str):
    theirs = fla("simple_gla", form)

    def ours(**a: Tensor):
        with kernels.backend(backend):
            return kernels.linear_recurrence(**a, scale=scale, return_state=True)

    def as_theirs(v: Tensor, log_decay: Tensor, beta: Tensor, **a: Tensor):
        return theirs(**a, v=v * beta[..., None], g=log_decay, scale=scale, output_final_state=True)

    compare(ours, as_theirs, inputs(length, dtype=torch.float32))


@pytest.mark.parametrize("decay", ["mild", "mixed"])  # both ways of taking scores apart
@pytest.mark.parametrize("length", [15, 130])
def test_a_decay_per_channel(fla, length: int, decay: str):
    theirs = fla("gla", "naive_recurrent_gla")

    def as_theirs(v: Tensor, log_decay: Tensor, beta: Tensor, **a: Tensor):
        return theirs(**a, v=v * beta[..., None], gk=log_decay, output_final_state=True)

    arguments = inputs(length, gate="channel", decay=decay, dtype=torch.float32)
    compare(lambda **a: kernels.linear_recurrence(**a, return_state=True), as_theirs, arguments)


@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("length", [15, 130])
def test_no_decay(fla, length: int, scale: float | None):
    theirs = fla("linear_attn", "naive_recurrent_linear_attn")

    def as_theirs(v: Tensor, beta: Tensor, **a: Tensor):
        return theirs(**a, v=v * beta[..., None], scale=scale, output_final_state=True)

    arguments = inputs(length, gate="none", dtype=torch.float32)
    compare(lambda **a: kernels.linear_recurrence(**a, scale=scale, return_state=True), as_theirs, arguments)
