"""mLSTM against transformers' layer and against its formula in NumPy; stabiliser, normaliser, caps and subheads."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
import mixers
from mixers import MLSTM, Expanded, Site
from mixers.stabiliser import stabiliser
from zoo import LanguageModel
from zoo.lm import Uniform

from .finite_differences import check_against_formula, sigmoid
from .test_parity import Oracle, compare, shaken

SITE = Site(hidden_size=32, num_heads=2)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("length", [16, 128])
def test_the_layer_of_transformers(oracle: Oracle, length: int, backend: str):
    theirs = oracle("transformers.models.xlstm.modeling_xlstm")
    sizes = {"hidden_size": 32, "num_heads": 2, "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "chunk_size": 16}
    config = theirs.xLSTMConfig(
        **sizes, num_hidden_layers=1, mode="train", return_last_states=True, autocast_kernel_dtype="float32"
    )
    layer, ours = shaken(theirs.xLSTMLayer(config)), MLSTM(SITE)
    with torch.no_grad():
        layer.igate_preact.bias.copy_(torch.tensor([-1.0, 2.0]))
        layer.fgate_preact.bias.copy_(torch.tensor([0.5, 4.0]))
    names = {"q": "q", "k": "k", "v": "v", "i": "igate_preact", "f": "fgate_preact", "g": "ogate_preact"}
    pairs = {f"{other}.weight": f"in_proj.{name}.weight" for name, other in names.items()}
    pairs |= {"igate_preact.bias": "gate.input_bias", "fgate_preact.bias": "gate.forget_bias"}
    pairs |= {"multihead_norm.weight": "o_norm.weight", "out_proj.weight": "o_proj.weight"}
    weights, own = dict(layer.named_parameters()), ours.state_dict()
    of_ours = {name: weights[other].view_as(own[name]) for other, name in pairs.items()}
    with kernels.backend(backend):  # both round in fp32, and the gradients of gates are sums that cancel
        compare(ours, layer, of_ours, torch.randn(2, length, 32), lambda x: layer(x)[0], tolerance=6e-5)


Weights = Mapping[str, np.ndarray]


def formula(x: np.ndarray, w: Weights, mixer: MLSTM, cap: float) -> np.ndarray:
    """Compute the published layer token by token. The subheads of a head share its matrix and its normaliser."""
    H, E, K, V = mixer.num_heads, mixer.subheads, mixer.subhead_size, mixer.value_size

    def stream(name: str) -> np.ndarray:
        return x @ w[f"in_proj.{name}.weight"].T

    def capped(name: str, bias: str) -> np.ndarray:
        return cap * np.tanh((stream(name) + w[f"gate.{bias}"]) / cap)

    def expanded(name: str) -> np.ndarray:
        y = stream(name).reshape(*x.shape[:2], H, -1)
        if E > 1:
            y = np.einsum("bthk,hke->bthe", y * sigmoid(y), w[f"{name}_expand.weight"])
        return y.reshape(*x.shape[:2], H, E, K)

    q, k, v = expanded("q") * K**-0.5, expanded("k"), stream("v").reshape(*x.shape[:2], H, V)
    i, f = (capped(*names).reshape(*x.shape[:2], H, E) for names in (("i", "input_bias"), ("f", "forget_bias")))
    log_f, outputs = -np.log1p(np.exp(-f)), []
    C, n, m = np.zeros((len(x), H, E, K, V)), np.zeros((len(x), H, E, K)), np.zeros((len(x), H))
    for t in range(x.shape[1]):
        new = np.maximum((log_f[:, t] + m[..., None]).max(-1), i[:, t].max(-1))  # one for all subheads
        keep, write = np.exp(log_f[:, t] + (m - new)[..., None]), np.exp(i[:, t] - new[..., None])
        C = keep[..., None, None] * C + np.einsum("bhe,bhek,bhv->bhekv", write, k[:, t], v[:, t])
        n, m = keep[..., None] * n + write[..., None] * k[:, t], new
        norm = np.maximum(np.abs(np.einsum("bhek,bhek->bh", n, q[:, t])), np.exp(-m)) + 1e-6
        outputs.append(np.einsum("bhekv,bhek->bhv", C, q[:, t]) / norm[..., None])
    h = np.stack(outputs, 1)
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-6) * w["o_norm.weight"].reshape(H, V)
    return (h.reshape(*x.shape[:2], -1) * sigmoid(stream("g"))) @ w["o_proj.weight"].T


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("bias", [-3.0, 2.0])  # normalisers below and above 1
def test_the_formula_and_its_finite_differences(bias: float, factor: int):
    mixer = Expanded(mixer=partial(MLSTM, input_bias=bias, gate_cap=5.0), factor=factor)(SITE).double()
    with torch.no_grad():
        mixer.in_proj.weight.mul_(2)
        mixer.gate.forget_bias.sub_(3)
    check_against_formula(mixer, lambda x, w: formula(x, w, mixer, 5.0), outputs=(1e-4, 1e-6))


@pytest.mark.parametrize("packed", [False, True])
def test_the_stabiliser_is_a_scan(packed: bool):
    f, i = F.logsigmoid(3 * torch.randn(1, 150, 2)), 5 * torch.randn(1, 150, 2)
    bounds = [0, 7, 7, 100, 150] if packed else [0, 150]
    before = torch.randn(len(bounds) - 1, 2).double()
    m, previous, last = stabiliser(f, i, before, torch.tensor(bounds) if packed else None, None)
    for number, (start, stop) in enumerate(zip(bounds, bounds[1:], strict=False)):
        running = before[number]
        for t in range(start, stop):
            torch.testing.assert_close(previous[0, t], running)
            running = torch.maximum(f[0, t] + running, i[0, t])
            torch.testing.assert_close(m[0, t], running)
        torch.testing.assert_close(last[number], running)


def test_gates_of_any_size_in_a_long_context():
    mixer, x = MLSTM(SITE, gate_cap=None, input_bias=0.0), torch.randn(1, 3000, 32)
    with torch.no_grad():
        mixer.in_proj.weight[-36:-32].mul_(200)  # input and forget gates of up to ± 300
        y = mixer(x)[0]
        expected = mixer.double()(x.double())[0]
    assert y.isfinite().all()
    assert (y.double() - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gain", "options"),
    [
        (50, {"gate_cap": None}),
        (1, {"gate_cap": 5.0, "input_bias": 2.0}),
        (50, {"gate_cap": None, "input_gate": "sigmoid"}),
        (1, {"input_gate": "sigmoid", "normaliser": False}),
    ],
)
@torch.no_grad()
def test_tokens_after_a_prompt(gain: int, options: dict[str, Any]):
    """Launches for single tokens continue a state, also with gates of any size and keys of zero."""
    mixer, x = MLSTM(SITE, **options), torch.randn(3, 6, 32)
    mixer.in_proj.weight[-36:-32].normal_(std=gain / 32**0.5)
    x[1, 0] = x[2, :4] = 0
    expected, last = mixer(x, mixer.init_state(3))
    y, state = mixer(x[:, :2], mixer.init_state(3))
    outputs = [y]
    with kernels.backend("triton"), kernels.implementations() as ran:
        for t in range(2, 6):
            y, state = mixer(x[:, t : t + 1], state)
            outputs.append(y)
    assert set(ran) <= {"recurrence_token", "linear"}
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)


def test_the_first_gates_and_sizes():
    mixer = MLSTM(Site(64, 4))
    assert mixer.gate.input_bias.tolist() == [-10.0] * 4
    assert mixer.gate.forget_bias.tolist() == [3, 4, 5, 6]
    assert mixer.matrix_shape == (4, 8, 17)
    assert mixer.state_size() == 4 * 8 * 17 + 4
    assert mixer.bfloat16().init_state(3).carried[0].dtype == torch.float64
    assert MLSTM(Site(64, 4), input_gate="sigmoid", normaliser=False).state_size() == 4 * 8 * 16


def test_sigmoid_gates_are_a_plain_recurrence():
    seen: list[Tensor] = []

    class Watched(MLSTM):
        def readout(self, o, s):
            seen.extend([o, s.log_decay, s.beta])
            return super().readout(o, s)

    mixer, x = Watched(SITE, input_gate="sigmoid", normaliser=False, gate_cap=None), torch.randn(2, 9, 32)
    mixer(x)
    q, k, v, i, f, _ = mixer.in_proj(x)
    q, k, v = (mixers.split_heads(y, 2) for y in (q, k, v))
    log_decay, beta = F.logsigmoid(f + mixer.gate.forget_bias), (i + mixer.gate.input_bias).sigmoid()
    torch.testing.assert_close(seen, [kernels.linear_recurrence(q, k, v, log_decay, beta)[0], log_decay, beta])


@pytest.mark.parametrize("initializer", ["normal", "uniform"])
def test_weights_of_gates_start_at_zero(initializer: str):
    """And all others as the model says; alone, too."""
    stack = Uniform(MLSTM)
    model = LanguageModel(
        stack, vocab_size=11, hidden_size=64, num_layers=1, num_heads=4, linear_initializer=initializer
    )
    for mixer in (model.mixers[0], MLSTM(Site(64, 4))):
        weights = {name: mixer.state_dict()[f"in_proj.{name}.weight"] for name in mixer.in_proj.widths}
        assert [name for name, weight in weights.items() if not weight.any()] == ["i", "f"]
        assert all(weight.std() > 0.01 for name, weight in weights.items() if name not in "if")
