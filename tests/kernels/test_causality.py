"""No bit of an output depends on later tokens, whatever these are."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels

from .comparisons import DEVICE
from .recurrences import DECAYS, erasing, inputs
from .test_value_decay_recurrence import inputs as value_inputs

MIXED = ("mild", "mixed", "strong")
SLOW = pytest.mark.slow


def case(name: str, backend: str, op: Any, make: partial[Any], T: int = 130, decays: Any = MIXED, **options: Any):
    """Calls of an op with some kinds of decays, each a parameter of the test."""
    for decay in decays:
        inputs_of = partial(make, T, decay=decay, state=make.func is erasing, dtype=torch.float32)
        marks = SLOW if backend == "triton" else ()
        yield pytest.param(op, inputs_of, options, backend, T, marks=marks, id=f"{name}, {decay}, {backend}")


def cases() -> Iterator[Any]:
    linear, delta = kernels.linear_recurrence, kernels.delta_rule
    for backend in ("torch", "triton"):
        for gate in ("constant", "head", "channel"):
            yield from case(f"decay per {gate}", backend, linear, partial(inputs, gate=gate))
        yield from case("delta rule", backend, delta, partial(inputs, gate="head"))
    for gate in ("head", "channel"):
        for steps in (1, 2):
            for read_before in (False, True):
                name, options = f"{gate}, {steps} steps, {read_before}", {"steps": steps, "read_before": read_before}
                make = partial(erasing, gate=gate, steps=steps)
                yield from case(name, "torch", delta, make, decays=DECAYS, **options)
    for form, gate in (("beta", "head"), ("erase", "head"), ("erase", "channel")):
        make = partial(erasing, form=form, gate=gate, steps=3, B=1, G=1, K=16, V=16)
        yield from case(f"steps, {form}, {gate}", "triton", delta, make, 30, ("mixed",), steps=3)
    for K in (16, 96):  # 96: the kernels of moderate and of steep rows have other blocks of keys
        make = partial(erasing, gate="channel", B=1, G=1, K=K, V=16)
        yield from case(f"keys of {K}", "triton", delta, make, 70, ("mild", "mixed"))
    make = partial(value_inputs, B=1, H=1)
    yield from case("decay per value", "triton", kernels.value_decay_recurrence, make, decays=("mild", "mixed"))


def later(x: Tensor, cut: int, gate: float | None) -> Tensor:
    """Other numbers from a row on: those of the sequence in reverse, or a constant decay."""
    other = x.flip(1) if gate is None else torch.full_like(x, gate)
    return torch.cat([x[:, :cut], other[:, cut:]], 1)


@pytest.mark.parametrize(("op", "make", "options", "backend", "T"), cases())
@torch.no_grad()
def test_causal_to_the_bit(op: Any, make: Callable[..., Any], options: dict[str, Any], backend: str, T: int):
    if backend == "triton":
        pytest.importorskip("triton")
    a = {name: x.to(DEVICE) for name, x in make().items()}
    along = [name for name, x in a.items() if x.dim() > 1 and name != "initial_state"]
    gates: list[float | None] = [None, -30.0, 0.0] if "log_decay" in along else [None]
    with kernels.backend(backend):
        expected = op(**a, **options)[0]
        for cut in {30: (10,), 70: (20,)}.get(T, (1, 20, 33, 64, 100) if backend == "torch" else (20, 100)):
            for gate in gates:
                names = along if gate is None else ["log_decay"]
                rows = {name: cut * a[name].shape[1] // T for name in names}  # several of a token of steps
                changed = a | {name: later(a[name], rows[name], gate) for name in names}
                o = op(**changed, **options)[0]
                assert torch.equal(o[:, :cut], expected[:, :cut]), (cut, gate)
                assert gate is not None or not torch.equal(o[:, cut:], expected[:, cut:])
