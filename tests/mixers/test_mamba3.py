"""Mamba-3 against its formula in NumPy, with finite differences; its angles, first values and sizes."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import kernels
import mixers
from mixers import Expanded, GatedRMSNorm, GateOnly, Mamba3, Site
from mixers.angles import cumulative_angles
from mixers.decay import Trapezoid

from .finite_differences import check_against_formula, sigmoid
from .test_parity import shaken

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SITE = Site(hidden_size=32, num_heads=2)
SMALL = partial(Mamba3, head_dim=16, state_dim=12, num_groups=2)
Weights = Mapping[str, np.ndarray]


def turned(x: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """The first pairs of channels as complex numbers, times exp(i · angle)."""
    pairs = angle.shape[-1]
    z = (x[..., 0 : 2 * pairs : 2] + 1j * x[..., 1 : 2 * pairs : 2]) * np.exp(1j * angle)
    numbers = np.stack([z.real, z.imag], -1).reshape(*z.shape[:-1], 2 * pairs)
    return np.concatenate([numbers, x[..., 2 * pairs :]], -1)


def formula(x: np.ndarray, w: Weights, mixer: Mamba3) -> np.ndarray:
    """Compute the published layer token by token. The E subheads of a head read and write the same values."""
    H, G, E, K = mixer.num_heads, mixer.num_key_heads, mixer.subheads, mixer.subhead_size

    def stream(name: str) -> np.ndarray:
        return x @ w[f"in_proj.{name}.weight"].T

    def keys(name: str, letter: str) -> np.ndarray:
        y = stream(name).reshape(*x.shape[:2], G, -1)
        if E > 1:
            y = np.einsum("btgk,gke->btge", y * sigmoid(y), w[f"{letter}_expand.weight"])
        y = y.reshape(*x.shape[:2], G, E, K)
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * w[f"{letter}_norm.weight"]
        return y.repeat(H // G, 2).reshape(*x.shape[:2], H * E, K) + w[f"{letter}_bias"]

    q, k, v = keys("C", "q"), keys("B", "k"), stream("x").reshape(*x.shape[:2], H, -1)
    dt = np.log1p(np.exp(stream("dt") + w["decay.dt_bias"]))
    r, share = stream("A"), sigmoid(stream("trap"))
    decay = np.exp(-np.where(r >= 0, 1 + r, 1 / (1 - r)) * dt)
    angle = np.cumsum(np.tanh(stream("angles"))[:, :, None] * np.pi * dt[..., None], 1)
    q, k, repeated = turned(q, angle), turned(k, angle), v.repeat(E, 2)
    S, written, outputs = np.zeros((len(x), H * E, K, v.shape[-1])), 0, []
    for t in range(x.shape[1]):
        new = np.einsum("bhk,bhv->bhkv", k[:, t], repeated[:, t])
        before, now = (1 - share[:, t]) * dt[:, t] * decay[:, t], share[:, t] * dt[:, t]
        S = decay[:, t, :, None, None] * S + before[..., None, None] * written + now[..., None, None] * new
        written = new
        outputs.append(np.einsum("bhkv,bhk->bhv", S, q[:, t]).reshape(len(x), H, E, -1).sum(2))
    z = stream("z")
    y = (np.stack(outputs, 1) + w["D"][:, None] * v).reshape(*x.shape[:2], -1)
    return (y * z * sigmoid(z)) @ w["out_proj.weight"].T


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("factor", [1, 2])
def test_the_formula_and_its_finite_differences(factor: int, backend: str):
    mixer = shaken(Expanded(mixer=SMALL, factor=factor)(SITE).double())
    with torch.no_grad():
        mixer.in_proj.weight.mul_(3)
        mixer.decay.dt_bias.add_(4)
    check_against_formula(mixer, lambda x, w: formula(x, w, mixer), backend=backend, outputs=(1e-5, 1e-5))


def test_the_gates():
    gates, raw = Trapezoid(3), torch.tensor([-1e9, -4.0, 0.0, 5.0]).view(1, 4, 1).expand(1, 4, 3)
    log_decay, dt, share = gates(torch.zeros(1, 4, 3), raw, raw)
    rate = torch.tensor([1e-4, 0.2, 1.0, 6.0]).view(1, 4, 1)
    torch.testing.assert_close(dt, F.softplus(gates.dt_bias).expand(1, 4, 3))
    torch.testing.assert_close(log_decay, -rate * dt)
    torch.testing.assert_close(share, raw.sigmoid())


@pytest.mark.parametrize("bounds", [[0, 100_000], [0, 40_001, 40_001, 100_000]])
def test_angles_of_a_long_context_are_exact(bounds: list[int]):
    turns, before = torch.rand(1, 100_000, 1), torch.rand(len(bounds) - 1, 1, 1, dtype=torch.float64)
    step = torch.full((1, 100_000, 1), 0.25)
    before = (before * 2**38).round() / 2**38
    packed = torch.tensor(bounds) if len(bounds) > 2 else None
    total, earlier, last = cumulative_angles(turns, step, before, packed, None)
    for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        assert torch.equal(
            last[number], (before[number] + (turns[0, start:stop, None] / 8).double().sum(0)).remainder(1)
        )
        if stop == start:
            continue
        piece, _, _ = cumulative_angles(
            turns[:, start:stop], step[:, start:stop], before[number : number + 1], None, None
        )
        assert torch.equal(piece, total[:, start:stop])
        assert torch.equal(earlier[:, start + 1 : stop], total[:, start : stop - 1])
        assert torch.equal(earlier[0, start], before[number].float())


@pytest.mark.parametrize("bounds", [None, [0, 5, 5, 70]])
def test_gradients_of_recomputed_keys(bounds: list[int] | None):
    mixer, x = SMALL(SITE), torch.randn(1, 70, 32, requires_grad=True)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)

    def gradients(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])

    expected = gradients(mixer(x, cu_seqlens=cu_seqlens)[0])
    with kernels.recomputing():
        y = mixer(x, cu_seqlens=cu_seqlens)[0]
    assert all(torch.equal(one, other) for one, other in zip(gradients(y), expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gain", "options"),
    [(1, {}), (50, {"rotary_fraction": 1.0, "num_groups": 1}), (1, {"output": GatedRMSNorm})],
)
@torch.no_grad()
def test_tokens_after_a_prompt(gain: int, options: dict[str, Any]):
    """Launches for single tokens continue a state, also with gates of any size."""
    pytest.importorskip("triton")
    mixer, x = shaken(SMALL(SITE, **options)), torch.randn(3, 6, 32)
    gates = sum(mixer.in_proj.widths[name] for name in ("dt", "A", "trap", "angles"))
    mixer.in_proj.weight[-gates:].mul_(gain)
    expected, last = mixer(x, mixer.init_state(3))
    y, state = mixer(x[:, :2], mixer.init_state(3))
    outputs = [y]
    with kernels.backend("triton"), kernels.implementations() as ran:
        for t in range(2, 6):
            y, state = mixer(x[:, t : t + 1], state)
            outputs.append(y)
    assert set(ran) <= {"trapezoid_token", "linear", "gated_rms_norm"}
    for actual, exact in ((torch.cat(outputs, 1), expected), (state.matrix, last.matrix)):
        assert (actual - exact).norm() <= 5e-5 * exact.norm()


class Doubled(GateOnly):
    def forward(self, o: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        return 2 * super().forward(o, gate)


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("bounds", [None, [0, 5, 5, 37]])
def test_kernels_compute_what_pytorch_does(bounds: list[int] | None, factor: int):
    pytest.importorskip("triton")
    mixer = shaken(Expanded(mixer=SMALL, factor=factor)(SITE)).to(DEVICE)
    x = torch.randn(1, 37, 32, device=DEVICE, requires_grad=True)
    cu_seqlens, results = None if bounds is None else torch.tensor(bounds, device=DEVICE), []
    for backend in ("torch", "triton"):
        with kernels.backend(backend), kernels.recomputing():
            y = mixer(x, cu_seqlens=cu_seqlens)[0]
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_subclass_of_the_output_gate_is_called(backend: str):
    pytest.importorskip("triton")
    mixer, x = SMALL(SITE).to(DEVICE), torch.randn(1, 9, 32, device=DEVICE)
    with kernels.backend(backend):
        expected = 2 * mixer(x)[0]
        mixer.output = Doubled(16)
        torch.testing.assert_close(mixer(x)[0], expected)


def test_the_first_values_and_sizes():
    mixer = Mamba3(Site(128, 3))  # the model's number of heads does not matter
    assert (mixer.num_heads, mixer.num_key_heads, mixer.key_size, mixer.value_size) == (4, 1, 128, 64)
    for parameter in (mixer.D, mixer.q_bias, mixer.k_bias, mixer.q_norm.weight, mixer.k_norm.weight):
        assert torch.equal(parameter, torch.ones_like(parameter))
    assert "q_bias" in mixer.no_weight_decay
    dt = F.softplus(Trapezoid(2000).dt_bias)
    assert [dt.min().item(), dt.max().item()] == pytest.approx([1e-3, 0.1], rel=0.03)
    assert mixer.state_size() == 4 * 128 * 64 + 4 * 32 + 128 + 4 * 64 + 4
    assert mixer.bfloat16().init_state(2).carried[0].dtype == torch.float64
    assert "z" not in Mamba3(Site(128, 3), output=mixers.NormOnly).in_proj.widths
    assert isinstance(Mamba3(Site(128, 3), output=GatedRMSNorm).output, GatedRMSNorm)
