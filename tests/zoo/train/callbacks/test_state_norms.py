"""Norms of the states after one row of a validation."""

import lightning as L
import pytest
import torch

import zoo
from kernels.errors import UserError
from tests.zoo.tiny import Batches, LossLog, ResumableLoader, TinyModel, batch, pretraining, trainer, validation_loader
from zoo.data.batch import Batch
from zoo.train.callbacks.state_norms import StateNorms, state_norms
from zoo.train.metrics_file import read_metrics


class Layered(TinyModel):
    """Its state as a language model's: a tuple, of one layer."""

    def forward(self, tokens, state=None, *, cu_seqlens=None):
        logits, carried = super().forward(tokens, None if state is None else state[0], cu_seqlens=cu_seqlens)
        return logits, None if state is None else (carried,)

    def init_state(self, batch_size, device=None, dtype=None):
        return (super().init_state(batch_size, device, dtype),)


def fit(folder, callback, validation, steps=12):
    L.seed_everything(5, verbose=False)
    module = pretraining()
    module.model = Layered(0.2)
    trainer(folder, [callback, log := LossLog()], steps).fit(module, ResumableLoader(40), validation)
    return module, log.losses, [row for row in read_metrics(folder / "metrics.jsonl") if "val_loss" in row]


def test_they_are_logged_with_every_second_validation(tmp_path):
    module, losses, rows = fit(tmp_path / "with", StateNorms(2), validation_loader())
    assert [(row["step"], "state_norm_0" in row) for row in rows] == [(3, True), (7, False), (11, True)]
    with torch.no_grad():
        _, (carried,) = module.eval().model(batch(1000).tokens[:1], module.model.init_state(1))
    assert rows[-1]["state_norm_0"] == pytest.approx(carried.norm().item(), rel=1e-5)
    _, others, rows = fit(tmp_path / "without", StateNorms(), validation_loader())
    assert losses == others
    assert not any("state_norm_0" in row for row in rows)


def test_of_packed_documents_the_first_counts(tmp_path):
    tokens = torch.arange(24).remainder(13)[None]
    packed = Batch(tokens, tokens, torch.tensor([0, 0, 5, 24], dtype=torch.int32))
    module, _, rows = fit(tmp_path, StateNorms(1), Batches(packed), steps=4)
    with torch.no_grad():
        _, (carried,) = module.eval().model(tokens[:, :5], module.model.init_state(1))
    assert rows[0]["state_norm_0"] == pytest.approx(carried.norm().item(), rel=1e-5)


def test_parts_of_the_state_of_a_hybrid():
    model = zoo.build("gdn_h2.yaml", "model.vocab_size=30", "model.hidden_size=32", "model.num_heads=2")
    with torch.no_grad():
        _, state = model(torch.arange(20)[None], model.init_state(1))
    norms = state_norms(state)
    assert list(norms) == [f"{i}_{part}" for i in range(6) for part in (("k", "v") if i % 3 == 2 else ("matrix",))]
    assert norms["1_matrix"].item() == pytest.approx(state[1].matrix.square().sum().sqrt().item())
    assert norms["2_k"] > 0


def test_less_than_each():
    with pytest.raises(UserError, match="every_n_validations is 0"):
        StateNorms(0)
