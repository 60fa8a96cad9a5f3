from math import prod

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import kernels
from kernels.flops import as_computed

from .recurrences import inputs


def counted(call) -> int:
    """What PyTorch counts, with the triangular solve as half of a product and attention in its plain form."""

    def solve(a, b, **_: object) -> int:
        return prod(b[:-2]) * b[-2] ** 2 * b[-1]

    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.linalg_solve_triangular: solve})
    with torch.no_grad(), kernels.backend("torch"), sdpa_kernel(SDPBackend.MATH), counter:
        call()
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"G": 2}, {"G": 1, "R": 4}, {"G": 2, "R": 2, "E": 3}])
@pytest.mark.parametrize("length", [16, 64, 256])
@pytest.mark.parametrize(
    ("op", "gate"),
    [(kernels.delta_rule, gate) for gate in ("none", "constant", "head")]
    + [(kernels.linear_recurrence, gate) for gate in ("none", "constant", "head", "channel")],
)
def test_recurrence_flops(op, gate: str, length: int, sizes: dict[str, int]):
    a = inputs(length, gate=gate, B=1, K=8, V=12, **sizes)
    G, R, E = (sizes.get(name, 1) for name in "GRE")
    sizes_of_heads = {"heads": G * R, "key_heads": G, "subheads": E, "key_size": 8, "value_size": 12}
    with as_computed():
        told = kernels.recurrence_flops(op, length, **sizes_of_heads, per_channel=gate == "channel")
    assert told == counted(lambda: op(**a, subheads=E))


def test_masked_halves_of_squares_count():
    sizes = {"heads": 2, "key_heads": 2, "subheads": 1, "key_size": 8, "value_size": 12}
    per_head, per_channel = (
        kernels.recurrence_flops(kernels.linear_recurrence, 64, **sizes, per_channel=each) for each in (False, True)
    )
    with as_computed():
        computed = kernels.recurrence_flops(kernels.linear_recurrence, 64, **sizes, per_channel=True)
    assert per_channel == per_head
    assert per_channel - computed == 2 * 2 * 8 * 64 * 65 // 2  # the diagonal, too, which is not a product


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"G": 2}, {"G": 2, "R": 2, "E": 3}])
@pytest.mark.parametrize("length", [16, 64, 256])
@pytest.mark.parametrize(("steps", "erase", "gate"), [(1, False, "channel"), (1, True, "head"), (2, True, "channel")])
def test_flops_of_the_general_delta_rule(steps: int, erase: bool, gate: str, length: int, sizes: dict[str, int]):
    a, rows = (inputs(n, gate=gate, B=1, K=8, V=12, **sizes) for n in (length, steps * length))
    a.update({name: rows[name] for name in ("k", "v", "beta")})
    G, R, E = (sizes.get(name, 1) for name in "GRE")
    if erase:
        a["erase"] = torch.randn(*a.pop("beta").shape, 8, dtype=torch.float64)
    with as_computed():
        told = kernels.recurrence_flops(
            kernels.delta_rule,
            length,
            heads=G * R,
            key_heads=G,
            subheads=E,
            key_size=8,
            value_size=12,
            per_channel=gate == "channel",
            erase=erase,
            steps=steps,
        )
    assert told == counted(lambda: kernels.delta_rule(**a, subheads=E, steps=steps))


@pytest.mark.parametrize("window", [None, 1, 30, 65, 256, 1000])
@pytest.mark.parametrize("length", [64, 256])
def test_attention_flops(length: int, window: int | None):
    q, kv = torch.randn(1, length, 4, 8), torch.randn(1, length, 2, 8)
    told = kernels.attention_flops(length, heads=4, head_dim=8, window_size=window)
    assert told == counted(lambda: kernels.window_attention(q, kv, kv, window_size=window))


def test_a_window_makes_the_work_linear():
    one, two = (kernels.attention_flops(n, heads=4, head_dim=8, window_size=128) for n in (4096, 8192))
    assert two == 2 * one
    assert kernels.attention_flops(8192, heads=4, head_dim=8) == 4 * kernels.attention_flops(4096, heads=4, head_dim=8)


def test_only_the_recurrences_have_recurrence_flops():
    with pytest.raises(ValueError, match=r"^op: "):
        kernels.recurrence_flops(print, 64, heads=1, key_heads=1, subheads=1, key_size=8, value_size=8)
