"""Our ops where Triton 3.4 to 3.7 is known to compile nonsense for Hopper, silently.

Compilers change, and nothing but a comparison of outputs *and* gradients would tell:

- A product, transposed, as the operand of another product: gradients of gated recurrences, of the decay above all, were
  wrong (FLA's issue 640). Our kernels transpose only what they have loaded.
- Chunks of 64, four warps, several products: wrong dk and dβ of the delta rule, or an illegal access (FLA's issue 984).
- Two warpgroups do not wait for each other's products: results that do not repeat.
- Keys of 16 and 32 beside values of 64: wrong dq and dk of the delta rule; see `test_real_sizes` in
  `test_delta_rule_triton.py`.
- One stage with blocks of 32: see the table in `kernels/gpu/launch_table.py`, of which `test_every_launch` there and
  `test_device` in `test_linear_recurrence_triton.py` try every entry.
- Heads of 132 and 200 channels with a decay per head: wrong results or illegal accesses of the linear recurrence,
  which pads them since; `test_device` has such sizes.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import kernels

from . import test_selective_scan
from .comparisons import assert_repeats
from .recurrences import inputs, results

pytestmark = pytest.mark.gpu

GATED: dict[str, tuple[Callable, str]] = {
    "delta_rule": (kernels.delta_rule, "head"),
    "linear_head": (kernels.linear_recurrence, "head"),
    "linear_channel": (kernels.linear_recurrence, "channel"),
}
# by uniform numbers: as trained models have them, forgetting in a few steps, and everything now and then
STRENGTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "mild": lambda u: -0.1 * u,
    "strong": lambda u: -5 * u,
    "erasing": lambda u: -50 * u**4,
}


def made(name: str, T: int, strength: str = "mild", **sizes: object) -> dict[str, Tensor]:
    """bf16 inputs with gates in fp32, as mixers make them; keys as after an activation."""
    a = inputs(T, gate=GATED[name][1], correlated=True, state=False, dtype=torch.float32, **sizes)
    a["log_decay"] = STRENGTHS[strength](torch.rand_like(a["log_decay"]))
    return {n: x.to("cuda", torch.bfloat16 if n in "qkv" else torch.float32) for n, x in a.items()}


def errors(name: str, a: dict[str, Tensor], **options: object) -> dict[str, float]:
    """Of every result on Triton relative to the chunkwise form in fp32, after a second run gave the same bits."""
    run = partial(results, GATED[name][0], **options)
    actual, repeated = run(a, backend="triton"), run(a, backend="triton")
    assert all(torch.equal(actual[key], repeated[key]) for key in actual)
    expected = run({key: x.float() for key, x in a.items()}, backend="torch")
    return {key: float((actual[key].double() - x.double()).norm() / x.double().norm()) for key, x in expected.items()}


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("name", GATED)
def test_gradients_of_gates(name: str, strength: str):
    # a transposed product: every gradient, at the sizes at which it was wrong
    actual = errors(name, made(name, 4096, strength, B=4, G=8, K=128, V=128))
    assert actual.pop("gradient of log_decay") <= 2e-2
    assert max(actual.values()) <= 1e-2, actual


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("beta", ["random", 1, 2])
def test_chunks_of_64_with_four_warps(beta: str | float, size: int):
    # dk and dβ, with keys that are hard to tell apart
    actual = errors("delta_rule", made("delta_rule", 1024, B=2, G=8, K=size, V=size, beta=beta))
    assert max(actual.values()) <= 1e-2, actual


@pytest.mark.parametrize("name", GATED)
def test_bits_repeat_when_the_device_is_full(name: str):
    a = made(name, 2048, B=4, G=32, K=128, V=128)
    assert_repeats(partial(results, GATED[name][0], a, backend="triton"))


@pytest.mark.parametrize("shape", ["ramp", "random"])
@pytest.mark.parametrize("name", [*GATED, "linear_constant", "delta_constant", "selective_scan"])
def test_nothing_overflows_in_65536_steps(name: str, shape: str):
    T = 65536
    if name == "selective_scan":
        op, a = kernels.selective_scan, test_selective_scan.inputs(T, B=1, D=64, N=16, dtype=torch.float32)
    elif name in GATED:
        op, a = GATED[name][0], inputs(T, gate=GATED[name][1], B=1, K=64, V=64, dtype=torch.float32)
    else:
        op = kernels.delta_rule if name == "delta_constant" else kernels.linear_recurrence
        a = inputs(T, gate="constant", B=1, G=8, K=64, V=64, dtype=torch.float32)
    decay = a["log_decay"]
    steps = torch.linspace(1, 0, decay.shape[decay.dim() > 1]).reshape(-1, *[1] * (decay.dim() - 2))
    a["log_decay"] = -50 * (steps.expand_as(decay) if shape == "ramp" else torch.rand_like(decay) ** 8).contiguous()
    a["log_decay"].view(-1)[0], a["log_decay"].view(-1)[-1] = -50, 0
    a = {n: x.to("cuda", torch.bfloat16 if n in "qkvxbc" else torch.float32) for n, x in a.items()}
    first, second = (results(op, a, backend="triton") for _ in range(2))
    for key, x in first.items():
        assert x.isfinite().all(), key
        assert torch.equal(x, second[key]), key
