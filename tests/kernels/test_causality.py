"""No bit of an output depends on later tokens, whatever these are."""

import pytest
import torch
from torch import Tensor

import kernels

from .recurrences import inputs

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.slow)]
OPS = {
    "constant decay": (kernels.linear_recurrence, {"gate": "constant"}),
    "decay per head": (kernels.linear_recurrence, {"gate": "head"}),
    "decay per channel": (kernels.linear_recurrence, {"gate": "channel"}),
    "delta rule": (kernels.delta_rule, {"gate": "head"}),
}


def later(x: Tensor, cut: int, gate: float | None) -> Tensor:
    """Other numbers from a token on: those of the sequence in reverse, or a constant decay."""
    other = x.flip(1) if gate is None else torch.full_like(x, gate)
    return torch.cat([x[:, :cut], other[:, cut:]], 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decay", ["mild", "mixed", "strong"])
@pytest.mark.parametrize("op", OPS)
def test_causal_to_the_bit(op: str, decay: str, backend: str):
    function, options = OPS[op]
    if backend == "triton":
        pytest.importorskip("triton")
    a = inputs(130, dtype=torch.float32, decay=decay, state=False, **options)
    along = [name for name, x in a.items() if x.shape[:2] == a["v"].shape[:2]]
    gates: list[float | None] = [None, -30.0, 0.0] if "log_decay" in along else [None]
    with torch.no_grad(), kernels.backend(backend):
        expected = function(**a)[0]
        for cut in (1, 20, 33, 64, 100) if backend == "torch" else (20, 100):
            for gate in gates:
                names = along if gate is None else ["log_decay"]
                changed = a | {name: later(a[name], cut, gate) for name in names}
                assert torch.equal(function(**changed)[0][:, :cut], expected[:, :cut]), (cut, gate)
