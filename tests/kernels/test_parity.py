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
Op = Callable[..., tuple[Tensor, Tensor]]


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


HEADS_FIRST = "delta_rule_recurrence"
LINEAR, DELTA = kernels.linear_recurrence, kernels.delta_rule
# our op; the package and function of flash-linear-attention, its argument of decays, its scales; options of `inputs`
FUNCTIONS: list[tuple[Op, str, str, str | None, tuple[float | None, ...], dict[str, str]]] = [
    (DELTA, "gated_delta_rule", "naive_recurrent_gated_delta_rule", "g", (None, 0.5), {}),
    (DELTA, "gated_delta_rule", "naive_chunk_gated_delta_rule", "g", (None, 0.5), {}),
    (DELTA, "delta_rule", HEADS_FIRST, None, (), {"gate": "none"}),
    *((LINEAR, "simple_gla", f"naive_{how}_simple_gla", "g", (None, 0.5), {}) for how in ("recurrent", "chunk")),
    # both ways of taking scores apart
    *((LINEAR, "gla", "naive_recurrent_gla", "gk", (), {"gate": "channel", "decay": d}) for d in ("mild", "mixed")),
    (LINEAR, "linear_attn", "naive_recurrent_linear_attn", None, (None, 1.0), {"gate": "none"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(
    ("op", "family", "function", "decay", "scales", "options"), FUNCTIONS, ids=[name for _, _, name, *_ in FUNCTIONS]
)
@pytest.mark.parametrize("length", [15, 130])
def test_naive_functions(
    oracle: Oracle,
    length: int,
    op: Op,
    family: str,
    function: str,
    decay: str | None,
    scales: tuple[float | None, ...],
    options: dict[str, str],
    backend: str,
):
    theirs = getattr(oracle(f"fla.ops.{family}.naive"), function)
    for scaled in [{"scale": scale} for scale in scales] or [{}]:

        def ours(scaled: dict[str, float | None] = scaled, **a: Tensor):
            with kernels.backend(backend):
                return op(**a, **scaled, return_state=True)

        def as_theirs(scaled: dict[str, float | None] = scaled, **a: Tensor):
            if op is LINEAR:
                a["v"] = a["v"] * a.pop("beta")[..., None]
            if function == HEADS_FIRST:
                turned = {name: x if name == "initial_state" else x.transpose(1, 2) for name, x in a.items()}
                o, state = theirs(**turned)
                return o.transpose(1, 2), state
            decays = {decay: a.pop("log_decay")} if decay else {}
            return theirs(**a, **decays, **scaled, output_final_state=True)

        compare(ours, as_theirs, inputs(length, correlated=op is DELTA, dtype=torch.float32, **options))
