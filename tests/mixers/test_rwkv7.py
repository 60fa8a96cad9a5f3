"""RWKV-7 against its formula in NumPy, with finite differences; its first values, streams and sizes."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch

import kernels
import mixers
from mixers import RWKV7, Expanded, Site
from mixers.contract import CLAUSES
from mixers.rwkv7 import FIRST_VALUE
from mixers.two_layers import TwoLayers

from .finite_differences import check_against_formula, sigmoid
from .test_parity import shaken

SITE = Site(hidden_size=32, num_heads=2, layer=1, num_layers=3)
SMALL = partial(RWKV7, head_dim=8, rate_rank=5, value_rank=3, gate_rank=6)
Weights = Mapping[str, np.ndarray]


def layer(x: np.ndarray, w: Weights, mixer: RWKV7, first: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Compute y and the first values token by token. The E subheads of a head read and write the same values."""
    H, E, K = mixer.num_heads, mixer.subheads, mixer.subhead_size
    B, T, C = x.shape
    before = np.concatenate([np.zeros((B, 1, C)), x[:, :-1]], 1)
    r, d, k, v, a, g = (x + (before - x) * share for share in w["mix"])

    def low_rank(y: np.ndarray, name: str, activation=lambda z: z) -> np.ndarray:
        return activation(y @ w[f"{name}.down.weight"].T) @ w[f"{name}.up.weight"].T

    def keys(y: np.ndarray, letter: str) -> np.ndarray:
        if mixer.site.expand is not None:
            y = y.reshape(B, T, H, -1)
            y = np.einsum("bthk,hke->bthe", y * sigmoid(y), w[f"{letter}_expand.weight"])
        return y.reshape(B, T, H * E, K)

    decay = np.exp(-math.exp(-0.5) * sigmoid(w["decay_bias"] + low_rank(d, "decay", np.tanh))).reshape(B, T, H * E, K)
    values = v @ w["v_proj.weight"].T
    if first is None:
        first = values
    else:
        values = values + (first - values) * sigmoid(w["value_bias"] + low_rank(v, "value"))
    r, k = keys(r @ w["r_proj.weight"].T, "q"), keys(k @ w["k_proj.weight"].T, "k")
    rate = sigmoid(w["rate_bias"] + low_rank(a, "rate")).reshape(B, T, H * E, K)
    k_k, k_a, r_k = (w[name].reshape(H * E, K) for name in ("k_k", "k_a", "r_k"))
    direction = k * k_k
    direction = direction / np.maximum(np.linalg.norm(direction, axis=-1, keepdims=True), 1e-12)
    k = k * (1 + (rate - 1) * k_a)
    v = values.reshape(B, T, H, -1)
    repeated = v.repeat(E, 2)
    S, outputs = np.zeros((B, H * E, v.shape[-1], K)), []  # as published: rows are values
    for t in range(T):
        erased = np.einsum("bhvk,bhk->bhv", S, -direction[:, t])
        S = (
            S * decay[:, t, :, None]
            + np.einsum("bhv,bhk->bhvk", erased, direction[:, t] * rate[:, t])
            + np.einsum("bhv,bhk->bhvk", repeated[:, t], k[:, t])
        )
        outputs.append(np.einsum("bhvk,bhk->bhv", S, r[:, t]).reshape(B, H, E, -1).sum(2))
    o = np.stack(outputs, 1)
    o = (o - o.mean(-1, keepdims=True)) / np.sqrt(o.var(-1, keepdims=True) + mixer.o_norm.eps)
    o = o * w["o_norm.weight"] + w["o_norm.bias"]
    o = o + (r * k * r_k).sum(-1).reshape(B, T, H, E).sum(-1)[..., None] * v
    return (o.reshape(B, T, C) * low_rank(g, "g", sigmoid)) @ w["o_proj.weight"].T, first


def both_layers(x: np.ndarray, w: Weights, both: TwoLayers) -> np.ndarray:
    lower, upper = ({name.partition(".")[2]: p for name, p in w.items() if name.startswith(part)} for part in "lu")
    y, first = layer(x, lower, both.lower, None)
    return layer(x + y, upper, both.upper, first)[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("factor", "subheads"), [(1, True), (2, True), (2, False)])
def test_the_formula_and_its_finite_differences(factor: int, subheads: bool, backend: str):
    build = Expanded(mixer=SMALL, factor=factor, subheads=subheads)
    both = shaken(TwoLayers(SITE, lower=build, upper=build).double())
    with torch.no_grad():
        for mixer in (both.lower, both.upper):
            mixer.k_proj.weight.mul_(5)
            mixer.o_proj.weight.mul_(3)
    exact = (1e-8, 1e-8)
    check_against_formula(both, lambda x, w: both_layers(x, w, both), backend=backend, outputs=exact, gradients=1e-5)


@pytest.mark.slow
def test_other_ranks_keep_the_contract():
    factory = partial(RWKV7, head_dim=16, rate_rank=5, value_rank=3, gate_rank=7, norm_eps=1e-3)
    assert len(mixers.check_mixer(factory)) == 4 * len(CLAUSES)  # alone, above another, and expanded in two ways


def test_the_first_values():
    """As the author's training code has them, for a model of 12 layers and 768 channels."""
    mixer = RWKV7(Site(768, 12, 5, 12, passed=(FIRST_VALUE,)))
    assert (mixer.num_heads, mixer.key_size, mixer.value_size, mixer.o_norm.eps) == (12, 64, 64, 64e-5)
    i, C = torch.arange(768.0), 768
    powers = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
    for row, power in zip(mixer.mix, powers.values(), strict=True):
        torch.testing.assert_close(row, 1 - (i / C).pow(power * (1 - 5 / 12)))
    for channel in (0, 17, 63, 64, 500, 767):
        z = (channel % 64 - 31.5) / 31.5
        zigzag, line = z * abs(z), channel / 767 - 0.5
        decay = -6 + 6 * (channel / 767) ** (1 + (5 / 11) ** 0.3)
        starts = {
            "decay_bias": decay + 0.5 + 2.5 * zigzag,
            "rate_bias": -0.19 + 0.3 * zigzag + 0.4 * line,
            "value_bias": 0.73 - 0.4 * line,
            "k_k": 0.71 - 0.1 * line,
            "k_a": 1.02,
            "r_k": -0.04,
        }
        for name, start in starts.items():
            assert getattr(mixer, name)[channel].item() == pytest.approx(start, abs=1e-5), name
    torch.testing.assert_close(mixer.o_norm.weight, torch.full((12, 64), 0.5**0.7))
    for low_rank, rank in ((mixer.decay, 64), (mixer.rate, 64), (mixer.value, 32), (mixer.g, 128)):
        assert low_rank.down.weight.shape == (rank, 768)
        assert not low_rank.down.weight.any()
        torch.testing.assert_close(low_rank.up.weight.T @ low_rank.up.weight, 0.01 * torch.eye(rank), atol=1e-6, rtol=0)
    for weight, gain in ((mixer.r_proj, 1), (mixer.k_proj, 0.1), (mixer.v_proj, 1)):
        product = weight.weight @ weight.weight.T
        torch.testing.assert_close(product, gain**2 * torch.eye(768), atol=1e-5, rtol=0)
    assert not mixer.o_proj.weight.any()
    assert not [name for name in ("mix", "r_k") if name not in mixer.no_weight_decay]


def test_the_model_leaves_these_values_alone():
    torch.manual_seed(0)
    model = mixers_in_a_model(3)
    alone = RWKV7(Site(32, 2, 2, 3, passed=(FIRST_VALUE,)), head_dim=8)
    above = model.mixers[2]
    for name in ("mix", "decay_bias", "value_bias", "k_k"):
        assert torch.equal(getattr(above, name), getattr(alone, name))
    assert not above.o_proj.weight.any()
    assert not above.decay.down.weight.any()
    torch.testing.assert_close(above.k_proj.weight @ above.k_proj.weight.T, 0.01 * torch.eye(32), atol=1e-6, rtol=0)


def mixers_in_a_model(layers: int):
    from zoo.lm import LanguageModel, RWKV7ChannelMix, Uniform

    stack = Uniform(partial(RWKV7, head_dim=8))
    return LanguageModel(stack, vocab_size=11, hidden_size=32, num_layers=layers, mlp=RWKV7ChannelMix)


def test_decays_stay_above_their_bound():
    mixer = shaken(SMALL(SITE))
    with torch.no_grad():
        mixer.decay_bias.fill_(1e4)
    s, _ = mixer._project(torch.randn(6, 1, 5, 32).unbind(), None)
    log_decay = mixer.gates(s).log_decay
    torch.testing.assert_close(log_decay, torch.full_like(log_decay, -math.exp(-0.5)))


def test_keys_of_zero_erase_nothing():
    mixer = shaken(SMALL(SITE)).double()
    with torch.no_grad():
        mixer.k_k.zero_()
    x = torch.randn(1, 5, 32, dtype=torch.float64, requires_grad=True)
    y = mixer(x)[0]
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    s, _ = mixer._project((x,) * 6, None)
    assert not mixer.gates(s).erase.any()


def test_the_lowest_layer_makes_the_first_values():
    lowest, above = SMALL(SITE), SMALL(SITE._replace(passed=(FIRST_VALUE,)))
    assert lowest.value is None
    assert {*dict(above.named_parameters())} - {*dict(lowest.named_parameters())} == {
        "value.down.weight",
        "value.up.weight",
        "value_bias",
    }
    x = torch.randn(2, 5, 32)
    y, state, passed = shaken(lowest)(x, passed={})
    assert state is None
    assert passed[FIRST_VALUE].shape == x.shape
    assert torch.equal(lowest(x)[0], y)
    assert above(x, passed=passed)[2][FIRST_VALUE] is passed[FIRST_VALUE]


@pytest.mark.parametrize(
    ("passed", "message"),
    [
        (None, r"RWKV7 in layer 1 needs 'first_value' of a lower layer"),
        ({}, r"RWKV7 in layer 1 needs 'first_value' of a lower layer"),
        ({FIRST_VALUE: torch.zeros(2, 5, 16)}, r"'first_value' must have the shape \(2, 5, 32\), got \(2, 5, 16\)"),
    ],
)
def test_first_values_that_are_missing_or_do_not_fit(passed: dict | None, message: str):
    above = SMALL(SITE._replace(passed=(FIRST_VALUE,)))
    with pytest.raises(mixers.UserError, match=rf"^passed: {message}$"):
        above(torch.randn(2, 5, 32), passed=passed)


def test_a_state_has_the_last_token():
    mixer = shaken(SMALL(SITE))
    assert mixer.state_size() == 4 * 8 * 8  # the last token is bookkeeping
    x = torch.randn(2, 5, 32)
    _, state = mixer(x, mixer.init_state(2))
    assert torch.equal(state.histories[-1], x[:, -1:])
    assert mixer.bfloat16().init_state(2).histories[-1].dtype == torch.bfloat16


def test_recomputing_changes_no_bit():
    above = shaken(SMALL(SITE._replace(passed=(FIRST_VALUE,))))
    norm, leaves = mixers.LayerNorm(32), [torch.randn(2, 5, 32, requires_grad=True) for _ in range(2)]
    inputs, gradients = [*leaves, *above.parameters(), *norm.parameters()], []
    for context in (nullcontext(), kernels.recomputing()):
        with context:
            y = above(norm(leaves[0]), passed={FIRST_VALUE: leaves[1]})[0]
        gradients.append(torch.autograd.grad(y.square().sum(), inputs))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def saved_bytes(mixer: torch.nn.Module, **arguments: object) -> int:
    """Bytes that the Triton kernels of a mixer keep for the gradients of a training step in bf16."""
    mixer, sizes = mixer.bfloat16(), dict[int, tuple[int, torch.Tensor]]()
    weights = {p.data_ptr() for p in mixer.parameters()}

    def note(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes(), x  # alive, so that no other tensor gets its address
        return x

    x = torch.randn(1, 64, mixer.site.hidden_size).bfloat16().requires_grad_()
    with kernels.backend("triton"), torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        mixer(x, **arguments)
    return sum(size for size, _ in sizes.values())


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter")
def test_it_keeps_at_most_twice_what_kda_keeps():
    """Without recomputing: 77 bytes per token and channel, where KDA keeps 44."""
    site, first = Site(64, 1, passed=(FIRST_VALUE,)), torch.randn(1, 64, 64).bfloat16()
    above = RWKV7(site, rate_rank=8, value_rank=8, gate_rank=8)
    assert saved_bytes(above, passed={FIRST_VALUE: first}) <= 2 * saved_bytes(mixers.KDA(Site(64, 1)))
