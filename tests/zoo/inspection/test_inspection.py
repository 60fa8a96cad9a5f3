"""Exact matrices of what layers compute along time, and what is derived from them."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
import mixers
import zoo
from mixers import registry
from zoo.inspection import Layer
from zoo.inspection.calls import Call, calls_of_layer
from zoo.inspection.recall import Questions, margins

SITE = mixers.Site(hidden_size=64, num_heads=2, layer=1, num_layers=3)
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300)
WITHOUT = ("Bidirectional", "HGRN1", "Mamba1")  # no sums of values over pairs of tokens
NAMES = [name for name in registry.names() if name not in WITHOUT]
LINEAR = [name for name in NAMES if issubclass(registry.entry(name).mixer, mixers.LinearMixer)]


def mixer_of(name: str, factor: int = 1, **arguments: Any) -> mixers.TokenMixer:
    torch.manual_seed(0)
    entry = registry.entry(name)
    factory: Any = partial(entry.mixer, **{**entry.tiny, **arguments})
    made = factory(SITE) if factor == 1 else mixers.Expanded(mixer=factory, factor=factor)(SITE)
    return made.double()


def packed(*lengths: int) -> tuple[Tensor, Tensor]:
    """Random inputs of documents, and their boundaries."""
    torch.manual_seed(1)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return torch.randn(1, int(ends[-1]), 64, dtype=torch.float64), ends


def last_layer(mixer: mixers.TokenMixer, x: Tensor, **options: Any) -> Layer:
    return Layer(calls_of_layer(mixer, x, **options)[-1])


@pytest.mark.parametrize(
    ("name", "factor"), [(name, factor) for name in NAMES for factor in ((1, 4) if name in LINEAR else (1,))]
)
def test_the_output_is_the_matrix_times_the_values(name: str, factor: int) -> None:
    x, ends = packed(*LENGTHS)
    layer = last_layer(mixer_of(name, factor), x, cu_seqlens=ends)
    assert layer.has_state == (name in LINEAR)
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    of_writes = owner.repeat_interleave(layer.steps)
    for head in range(layer.heads):
        matrix, output = layer.attention(head), layer.call.output[0, :, head]
        assert (matrix @ layer.values(head) - output).abs().max() <= 1e-10 * max(1.0, float(output.abs().max()))
        assert not matrix[owner[:, None] != of_writes].any()


def test_the_scores_of_slots_are_matrices_of_their_channels() -> None:
    x, ends = packed(5, 33)
    first, _ = calls_of_layer(mixer_of("GatedSlotAttention"), x, cu_seqlens=ends)
    layer = Layer(first)
    for channel in (0, 7):
        found = layer.attention(1, channel=channel) @ layer.values(1)[:, channel]
        assert torch.allclose(found, first.output[0, :, 1, channel], atol=1e-10)


@pytest.mark.parametrize("name", ["GatedDeltaNet", "Mamba2", "GLA"])
def test_the_matrix_is_the_derivative_of_the_output(name: str) -> None:
    """By finite differences of the op: another value at one write changes the outputs by the matrix's column."""
    x, _ = packed(21)
    layer = last_layer(mixer_of(name), x)
    change = torch.zeros_like(layer.arguments["v"])
    change[0, 5, 1] = 1e-3
    outputs = [layer.call.op(**layer.arguments | {"v": layer.arguments["v"] + sign * change})[0] for sign in (1, -1)]
    column = (outputs[0] - outputs[1])[0, :, 1] / 2e-3
    assert torch.allclose(column, layer.attention(1)[:, 5:6].expand_as(column), atol=1e-9)


@pytest.mark.parametrize("name", ["DeltaNet", "GatedDeltaNet", "GLA", "Mamba2"])
def test_the_matrix_is_that_of_the_formula(name: str) -> None:
    """A_ts = scale · q_tᵀ F_t … F_{s+1} (β_s k_s), where F_t = (I − β_t k_t k_tᵀ) Diag(α_t), without ops."""
    x, _ = packed(21)
    layer, head = last_layer(mixer_of(name), x), 1
    a, group = layer.arguments, layer.arguments["q"].shape[2] * head // layer.heads
    q, k, g = a["q"][0, :, group], a["k"][0, :, group], layer.recurrence(head, 0, 0, 21).log_decay.exp()
    beta = torch.ones(21, dtype=torch.float64) if a.get("beta") is None else a["beta"][0, :, head]
    erases, scale = layer.call.op is kernels.delta_rule, a.get("scale") or q.shape[1] ** -0.5
    expected = torch.zeros(21, 21, dtype=torch.float64)
    for s in range(21):
        left = beta[s] * k[s]
        for t in range(s, 21):
            if t > s:
                left = left * g[t]
                left = left - erases * beta[t] * (k[t] @ left) * k[t]
            expected[t, s] = scale * (q[t] @ left)
    assert torch.allclose(layer.attention(head), expected, rtol=0, atol=1e-10)


def test_a_reset_and_steep_decays() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 8, dtype=torch.float64) for _ in range(3))
    log_decay = -100 * torch.rand(1, 40, 2, 8, dtype=torch.float64) ** 8
    log_decay[0, 11, :, :3] = -math.inf
    beta = torch.rand(1, 40, 2, dtype=torch.float64)
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay}
    layer = Layer(Call(kernels.delta_rule, arguments, kernels.delta_rule(**arguments)[0]))
    assert torch.allclose(layer.attention(0) @ v[0, :, 0], layer.call.output[0, :, 0], atol=1e-10)
    assert layer.steep_share() > 0
    found = layer.retention(0)
    seen = ~found.left.isnan()
    assert torch.allclose((found.left + found.decayed + found.erased)[seen], torch.ones(1, dtype=torch.float64))


class TestRetention:
    @pytest.mark.parametrize("name", ["DeltaNet", "GatedDeltaProduct", "RWKV7", "Comba"])
    def test_shares_add_up_and_are_what_a_query_with_the_key_reads(self, name: str) -> None:
        x, ends = packed(7, 12)
        layer = last_layer(mixer_of(name), x, cu_seqlens=ends)
        found = layer.retention(1)
        seen = ~found.left.isnan()
        total = found.left + found.decayed + found.erased
        assert torch.allclose(total[seen], torch.ones(1, dtype=torch.float64))
        assert not seen[6, 7 * layer.steps :].any()
        # a query that is the key of token 9's last write reads this share, at the last token, of what it read at once
        s = 10 * layer.steps - 1
        q = layer.arguments["q"].clone()
        q[0, :, 1] = layer.recurrence(1, 0, 7, 19).k[s - 7 * layer.steps]
        asked = Layer(Call(layer.call.op, layer.arguments | {"q": q}, layer.call.output)).attention(1)[:, s]
        assert float(asked[-1] / asked[9]) == pytest.approx(float(found.left[-1, s]))

    def test_a_repeated_key_erases_the_first_write(self) -> None:
        torch.manual_seed(0)
        k = torch.nn.functional.normalize(torch.randn(1, 6, 1, 16, dtype=torch.float64), dim=-1)
        k[0, 4] = k[0, 1]
        v, beta = torch.randn(1, 6, 1, 4, dtype=torch.float64), torch.ones(1, 6, 1, dtype=torch.float64)
        arguments: dict[str, Any] = {"q": k, "k": k, "v": v, "beta": beta}
        layer = Layer(Call(kernels.delta_rule, arguments, kernels.delta_rule(**arguments)[0]))
        found = layer.retention(0)
        assert int(found.eraser[1]) == 4
        assert abs(float(found.left[4, 1])) < 0.5 < float(found.left[3, 1])


@pytest.mark.parametrize("delay", [0, 2])
def test_a_head_that_reads_values_at_a_delay(delay: int) -> None:
    """Value i is at token 2i + 1 and written `delay` tokens later, under the i-th key; head 1 reads at random."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 16, dtype=torch.float64) for _ in range(3))
    q[:, :, 0], k[:, :, 0] = 0, 0
    for i in range(4):
        k[0, 2 * i + 1 + delay, 0, i] = q[0, 15 + i, 0, i] = 1
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v}
    layer = Layer(Call(kernels.linear_recurrence, arguments, v))
    questions = Questions(15 + torch.arange(4), torch.arange(4), 2 * torch.arange(4) + 1)
    margin = margins(layer, questions)
    assert margin.shape == (2, 4, 4)
    assert torch.allclose(margin[0, delay], torch.ones(4, dtype=torch.float64))
    assert not (margin[0, [d for d in range(4) if d != delay]] > 0).any()


def test_states_and_half_lives() -> None:
    x, ends = packed(70, 3)
    mixer = mixer_of("GatedDeltaNet", 4)
    layer = last_layer(mixer, x, cu_seqlens=ends)
    found = layer.spectra(32)
    assert found.ends.tolist() == [32, 64, 70, 73]
    assert found.values.shape == (4, 2, 32)
    assert bool((found.effective_ranks[-1] <= 3 + 1e-9).all())  # of three writes
    assert found.effective_ranks.max() <= 32
    state = layer.call.op(**layer.arguments | {"return_state": True})[1]
    norms = state[1].unflatten(0, (2, 4)).flatten(1).norm(dim=-1)
    assert torch.allclose(found.norms[-1], norms)
    constant = last_layer(mixer_of("RetNet"), x[:, :70])
    decay = constant.arguments["log_decay"]
    assert torch.allclose(constant.half_lives().flatten(), -math.log(2) / decay.double())
    assert last_layer(mixer_of("DeltaNet"), x[:, :70]).half_lives().isposinf().all()


TINY = {
    "model": {"hidden_size": 64, "num_heads": 2, "num_layers": 3, "vocab_size": 64},
    "data": {"class_path": "MQAR", "init_args": {"vocab_size": 64, "tasks": [{"length": 16, "pairs": 2}]}},
    "trainer": {"max_steps": 2, "accelerator": "cpu", "limit_val_batches": 1},
    "samples": {"prompts": []},
}


@pytest.mark.slow
class TestInspect:
    @pytest.fixture(scope="class")
    def model(self) -> zoo.LanguageModel:
        return zoo.build("gdn_h2.yaml", TINY)

    def test_tables_pictures_and_numbers(self, model: zoo.LanguageModel, tmp_path: Path) -> None:
        training = model.training
        found = zoo.inspect(model, range(40), output=tmp_path / "new", verbose=False)
        assert model.training == training
        names = {path.name for path in (tmp_path / "new").iterdir()}
        assert names == {"inspection.json", "attention.png", "retention.png", "spectra.png"}
        contents = json.loads((tmp_path / "new/inspection.json").read_text())
        assert [row["mixer"] for row in contents["layers"]] == ["Mamba2", "GatedDeltaNet"]
        assert found.layers[2].name == "SlidingWindowAttention"
        assert torch.allclose(found.layers[2].attention(0).sum(-1), torch.ones(40, dtype=torch.float64))
        assert found.table().row_count == 3

    def test_which_layers_read_the_right_values(self, model: zoo.LanguageModel) -> None:
        found = zoo.inspect(model, pairs=[1, 4], verbose=False)
        (one, four) = found.recall
        assert (one["pairs"], four["pairs"]) == (1, 4)
        assert len(found.tokens) == 64  # the pictures are of a prompt with the last number of pairs
        assert all(layer["read"] == 1 for layer in one["layers"])  # there is no other value
        assert all(-1 <= layer["margin"] <= 1 for layer in four["layers"])

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"prompt": "text"}, "tokenizer"),
            ({"prompt": []}, "prompt: is empty"),
            ({"prompt": [1, 2], "every": 0}, "every: 0"),
            ({"prompt": [1, 2], "layer": 3, "output": "x"}, "layer: 3 .* 0, 1, 2"),
            ({"pairs": [40]}, "pairs: 40"),
        ],
    )
    def test_mistakes(self, model: zoo.LanguageModel, arguments: dict[str, Any], says: str, tmp_path: Path) -> None:
        if "output" in arguments:
            arguments["output"] = tmp_path / "x"
        with pytest.raises(zoo.UserError, match=says):
            zoo.inspect(model, verbose=False, **arguments)
        assert not (tmp_path / "x").exists()

    def test_a_layer_that_does_not_exist(
        self, model: zoo.LanguageModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(zoo.UserError, match="layer: 7 must be one of those with matrices: 0, 1, 2"):
            zoo.inspect(model, [1, 2, 3], layer=7, output=tmp_path / "out")
        assert not capsys.readouterr().out

    @pytest.mark.slow
    def test_pairs_are_for_models_without_text(self, finished: Path) -> None:
        with pytest.raises(zoo.UserError, match="pairs: the model reads text; give a prompt"):
            zoo.inspect(finished / "runs" / "done", pairs=[4], verbose=False)

    def test_heads_and_layers_without_a_state(self, model: zoo.LanguageModel) -> None:
        found = zoo.inspect(model, [1, 2, 3], verbose=False)
        with pytest.raises(zoo.UserError, match="head: 2 is not one of the 2 of layer 1"):
            found.layers[1].attention(2)
        with pytest.raises(zoo.UserError, match="layer 2: SlidingWindowAttention has no matrix state"):
            found.layers[2].spectra()
