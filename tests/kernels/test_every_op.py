"""What holds for every op: it takes any layout, changes no argument, repeats its bits, and compiles as one graph."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from reproductions.proofs.op_calls import OpCall, cases
from zoo.performance.bench_calls import differentiated, learned_inputs, op_of

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CALLS = {case.name: case for case in cases(8) if "triton" in op_of(case.op).implementations}


RECURRENCES = ("linear_recurrence", "delta_rule", "value_decay_recurrence", "selective_scan")


def spread(x: Tensor) -> Tensor:
    """x with another number after each of its own."""
    return torch.stack([x, torch.full_like(x, 77)], -1)[..., 0]


def padded(x: Tensor) -> Tensor:
    """x with other numbers between its rows."""
    return F.pad(x, (0, 3), value=77)[..., :-3]


def packed(call: OpCall, length: int = 130) -> OpCall:
    """The call with documents in one row, two of which are empty."""
    bounds = torch.tensor([0, 0, 3, 67, 67, length], device=DEVICE)
    first = {name: x[:1] if x.shape[:2] == (2, length) else x for name, x in call.inputs.items()}
    if "initial_state" in first:
        first["initial_state"] = first["initial_state"][:1].repeat(len(bounds) - 1, 1, 1, 1)
    function = functools.partial(call.call or getattr(kernels, call.op), cu_seqlens=bounds)
    return replace(call, inputs=first, call=function)


def takes_documents(op: str) -> bool:
    return "cu_seqlens" in inspect.signature(getattr(kernels, op)).parameters


PACKABLE = [name for name, call in CALLS.items() if takes_documents(call.op) and call.op != "window_attention"]
each_call = pytest.mark.parametrize("name", [*CALLS, *(f"{name}, packed" for name in PACKABLE)])
each_backend = pytest.mark.parametrize("backend", ["torch", "triton"])


@functools.cache
def call_of(name: str) -> OpCall:
    call = CALLS[name.removesuffix(", packed")].on(DEVICE, torch.float32)
    return packed(call) if name.endswith(", packed") else call


@functools.cache
def results_of(name: str, backend: str) -> dict[str, Tensor]:
    return call_of(name).results(backend)


@pytest.mark.slow
@each_backend
@each_call
def test_arguments_stay_as_they_were_and_bits_repeat(name: str, backend: str):
    call = call_of(name)
    before = {name: x.clone() for name, x in call.inputs.items()}
    repeated = call.results(backend)
    assert all(torch.equal(call.inputs[each], x) for each, x in before.items())
    assert all(torch.equal(repeated[each], x) for each, x in results_of(name, backend).items())


@pytest.mark.slow
@each_backend
@each_call
def test_one_graph(name: str, backend: str):
    call = call_of(name)
    if call.op == "linear_token_losses":
        pytest.skip("it is for evaluation, which is not compiled")
    if backend == "torch" and (name.endswith(", packed") or call.op in RECURRENCES):
        pytest.skip("boundaries are read on the host, and loops over chunks take long to compile")
    torch._dynamo.reset()
    compiler = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    compiled = torch.compile(call.call or getattr(kernels, call.op), fullgraph=True, backend=compiler)
    actual = replace(call, call=compiled).results(backend)
    torch.testing.assert_close(actual, results_of(name, backend), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@each_backend
@each_call
def test_what_is_frozen_changes_no_other_gradient(name: str, backend: str):
    call = call_of(name)
    first, *others = learned_inputs(call.inputs)
    for wanted in ([first], others):
        _, gradients = differentiated(
            lambda leaves: replace(call, inputs=leaves).outputs(backend), call.inputs, wanted, call.arriving
        )
        for each, gradient in gradients.items():
            of_all = results_of(name, backend)[f"the gradient of {each}"]
            torch.testing.assert_close(gradient, of_all, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", [spread, padded])
@pytest.mark.parametrize("name", CALLS)
def test_inputs(name: str, layout: Callable[[Tensor], Tensor]):
    """In another layout, matrix products of libraries may add in another order, so results may differ by rounding."""
    call: OpCall = CALLS[name].on(DEVICE, torch.float32)
    apart = replace(call, inputs={name: layout(x) for name, x in call.inputs.items()})
    if layout is spread and call.op in RECURRENCES[:3]:
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
