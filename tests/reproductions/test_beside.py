"""`reproductions/beside.py`: other libraries get the arguments that they take, and what fails in them is a remark."""

import importlib
import inspect
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from reproductions import beside, peers
from reproductions.peer_ops import PEERS, PeerOp
from reproductions.peers import language_model
from tests.zoo.performance.test_bench import CPU, PLAIN
from zoo import config as configs
from zoo.performance import model as models
from zoo.performance.bench_calls import OPS, BenchCall, Shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "name", "mixers"),
    [
        ("kda.yaml", "kda", {"KimiDeltaAttention"}),
        ("gated_deltaproduct.yaml", "gated_deltaproduct", {"GatedDeltaProduct"}),
        ("gated_deltanet2.yaml", "gated_deltanet", {"GatedDeltaNet"}),  # of which it has no model
        ("transformer.yaml", "gated_deltanet", {"GatedDeltaNet"}),  # without linear layers
        ("rwkv7.yaml", "rwkv7", {"RWKV7Attention"}),
        ("gated_slot_attention.yaml", "gsa", {"GatedSlotAttention"}),
        ("forgetting_attention.yaml", "forgetting_transformer", {"ForgettingAttention"}),
    ],
)
def test_the_peer_has_our_mixers(config: str, name: str, mixers: set[str]):
    pytest.importorskip("fla")
    parsed = models.read([config, *PLAIN, "model.num_layers=4", "model.hidden_size=64"])
    ours = models.build(parsed, "32-true", torch.device("meta"))
    peer = language_model(ours, configs.to_dict(parsed)["model"], torch.device("meta"))
    assert peer.name == f"fla {name}"
    theirs = peer.build()
    assert {type(layer.attn).__name__ for layer in theirs.model.layers} == mixers
    assert sum(p.numel() for p in theirs.parameters()) == pytest.approx(ours.num_parameters(), rel=0.15)


def test_the_peer_of_a_model_without_mlps_has_none():
    pytest.importorskip("fla")
    names = []
    for options in (["model.mlp=null"], []):
        parsed = models.read(["mamba3.yaml", *PLAIN, "model.hidden_size=64", *options])
        ours = models.build(parsed, "32-true", torch.device("meta"))
        peer = language_model(ours, configs.to_dict(parsed)["model"], torch.device("meta"))
        names.append(peer.name)
        if options:
            assert sum(p.numel() for p in peer.build().parameters()) == ours.num_parameters()
    assert names == ["fla mamba3", "fla gated_deltanet"]


def test_the_peer_of_latent_attention_has_its_sizes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pytest.importorskip("fla.layers.mla"), "flash_attn_func", len)  # flash-attn is not installed
    parsed = models.read(["multihead_latent_attention.yaml", *PLAIN])
    ours = models.build(parsed, "32-true", torch.device("meta"))
    theirs = language_model(ours, configs.to_dict(parsed)["model"], torch.device("meta")).build()
    assert sum(p.numel() for p in theirs.parameters()) == ours.num_parameters()


def beside_ours(libraries: list[str] | None, case: BenchCall) -> dict[str, Any]:
    """The rows of the peers of a case."""
    (row,) = beside.measured(libraries, ["gentle"], case, 0.01, lambda stage: None)
    return row["peers"]


@pytest.mark.parametrize("works", [True, False])
def test_flash_qla_is_timed_where_it_is_installed(works: bool, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("fla")
    case = BenchCall("delta_rule", Shape(1, 2, 70, 16), "fp32", CPU, "torch", window=1)
    assert not any("flash_qla" in name for name in beside_ours(None, case))

    def rule(q, k, v, g, beta, *, scale):  # takes its arguments in FlashQLA's order
        if not works:
            raise ValueError("heads of 16 channels")
        return kernels.delta_rule(q, k, v, beta, g, scale=scale)

    monkeypatch.setitem(sys.modules, "flash_qla", types.SimpleNamespace(chunk_gated_delta_rule=rule))
    monkeypatch.setattr(peers, "version", lambda package: "0.1.3")
    peer = beside_ours(None, case)["flash_qla chunk_gated_delta_rule"]
    if works:
        assert max(peer["errors"].values()) < 1e-5
        assert peer["fwd_bwd_ms"] > 0
    else:
        assert peer == {"note": "ValueError: heads of 16 channels"}


def test_libraries_can_be_chosen():
    case = BenchCall("window_attention", Shape(1, 2, 70, 16), "fp32", CPU, "torch", window=70)
    rows = beside_ours(["sdpa", "cudnn"], case)
    assert rows["cudnn"] == {"note": "does not compute this call on this machine"}
    assert "fwd_ratio" in rows["sdpa causal"]
    assert {*rows} == {"cudnn", "sdpa causal"}


NAIVE = {  # of FLA, in PyTorch, with the arguments of its kernels; that of Comba reads the state after it decays
    "kda": ("fla.ops.kda.naive", "naive_recurrent_kda"),
    "gated_deltanet2": ("fla.ops.gdn2.naive", "naive_recurrent_gdn2"),
    "gated_deltaproduct": ("fla.ops.gated_delta_product.naive", "naive_recurrent_gated_delta_product"),
}


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("row", NAIVE)
def test_a_peer_gets_the_arguments_that_it_takes(row: str):
    pytest.importorskip("fla")
    case = BenchCall(row, Shape(1, 2, 70, 16), "fp32", CPU, "torch", window=1)
    module, function = NAIVE[row]
    naive = getattr(importlib.import_module(module), function)
    taken = inspect.signature(naive).parameters

    def with_those(*tensors: torch.Tensor, **arguments: Any) -> Any:
        defaults = {"scale": case.shape.D**-0.5} | arguments
        return naive(*tensors, **{name: value for name, value in defaults.items() if name in taken})

    for peer in (each for each in PEERS if each.row == row):
        gate = case.compared(lambda inputs, peer=peer: peer.adapt(with_those)(**inputs)[0])
        assert gate.passed, gate.says


@pytest.mark.parity
@pytest.mark.slow
def test_a_peer_that_computes_the_gates_gets_pre_activations():
    pytest.importorskip("fla")
    naive, gate = (importlib.import_module(f"fla.ops.kda.{module}") for module in ("naive", "gate"))

    def fused(q, k, v, g, beta, A_log, dt_bias, **settings):
        assert all(settings.pop(f"use_{part}_in_kernel") for part in ("gate", "qk_l2norm", "beta_sigmoid"))
        assert settings.keys() <= {"disable_recompute"}
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        return naive.naive_recurrent_kda(q, k, v, gate.naive_kda_gate(g, A_log, dt_bias), beta.sigmoid())

    case = BenchCall("kda_with_gates", Shape(2, 2, 70, 16), "fp32", CPU, "torch", window=1)
    for peer in (each for each in PEERS if each.row == case.name):
        gate_of_peer = case.compared(lambda inputs, peer=peer: peer.adapt(fused)(**inputs)[0])
        assert gate_of_peer.passed, gate_of_peer.says


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.row is not None], ids=lambda peer: peer.label)
def test_a_peer_is_called_with_arguments_of_its_signature(peer: PeerOp):
    pytest.importorskip("fla")
    signature = inspect.signature(getattr(importlib.import_module(peer.module), peer.function))
    case = BenchCall(peer.row, Shape(1, 2, 8, 16), "fp32", CPU, "torch", window=1)
    bound: dict[str, Any] = {}

    def recorder(*tensors: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, None]:
        bound.update(signature.bind(*tensors, **arguments).arguments)
        return case.do, None

    peer.adapt(recorder)(**case.inputs)
    assert bound.pop("kwargs", {}).keys() <= {"A_log", "dt_bias"}  # which some functions read from there
    tensors = [x for x in bound.values() if isinstance(x, torch.Tensor)]
    inputs = {name for name in case.inputs if name not in ("A_log", "dt_bias")}
    assert len(tensors) == len(inputs)


def test_every_delta_rule_has_a_peer():
    rows = {peer.row for peer in PEERS}
    assert {name for name, op in OPS.items() if op.decay is not None} == rows - {None}
    labels = [(peer.row, peer.label) for peer in PEERS if peer.row is not None]
    assert len(set(labels)) == len(labels)


def test_rows_of_fla_are_not_of_flashqla(monkeypatch: pytest.MonkeyPatch):
    """FLA calls FlashQLA where it is installed, unless a variable that FLA reads says not to."""
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    monkeypatch.setattr(peers, "version", lambda package: "0.6.0")
    monkeypatch.setitem(sys.modules, "fla.ops.common.chunk_o", types.SimpleNamespace())
    peers.require(torch.device("cuda"))
    assert os.environ["FLA_FLASH_QLA"] == "0"


class Theirs(torch.nn.Module):
    """A model with the interface of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.device = types.SimpleNamespace(vocab_size=32), CPU
        self.embed = torch.nn.Embedding(32, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any) -> types.SimpleNamespace:
        logits = self.embed(input_ids)
        return types.SimpleNamespace(loss=logits.square().mean(), logits=logits, past_key_values=None)


@pytest.mark.slow
def test_steps_of_both_models_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(peers, "require", lambda device: None)
    monkeypatch.setattr(peers, "language_model", lambda *_: peers.PeerModel("fla theirs", Theirs))
    config = ["gated_deltanet.yaml", *PLAIN]
    trained = beside.training(config, batch_size=1, length=8, steps=2, device="cpu", folder=str(tmp_path / "a"))
    decoded = beside.decode(config, [1], [2000], device="cpu", seconds=0.01, folder=str(tmp_path / "b"))
    for report in (trained, decoded):
        assert not report.failed
        assert [row["model"] for row in report.rows][-1] == "fla theirs"
        assert all(row["tokens_per_second"] > 0 for row in report.rows)
        assert "fla theirs" in [*report.table().columns[0].cells]
    assert [row["position"] for row in decoded.rows] == [2000, 1024]
