"""The pass that finds the kernels of the first step: once, as the step itself will be, and without a trace."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mixers import GatedDeltaNet
from tests.zoo.tiny import VOCAB, ResumableLoader, trainer, validation_loader
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Uniform
from zoo.train.callbacks import compiled_ahead
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.callbacks.compiled_ahead import CompiledAhead
from zoo.train.callbacks.compiled_blocks import CompiledBlocks
from zoo.train.metrics import total_loss
from zoo.train.module import Pretraining
from zoo.train.optim import Optimisation


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, bool]]:
    """The loss of each such pass, and whether blocks were replaced in it."""
    found = []

    def run(model: LanguageModel, loss) -> None:
        found.append((loss().detach(), "forward" in vars(model.layers[0])))

    monkeypatch.setattr(compiled_ahead, "compile_ahead", run)
    return found


def fitted(folder: Path, *callbacks, **options) -> Pretraining:
    torch.manual_seed(0)
    model = LanguageModel(Uniform(GatedDeltaNet), vocab_size=VOCAB, hidden_size=16, num_heads=2, num_layers=1)
    module = Pretraining(model, Optimisation(warmup_steps=2), config={"model": {}})
    run = trainer(folder, callbacks, max_steps=3, val_check_interval=3, **options)
    run.fit(module, ResumableLoader(8), validation_loader())
    return module


def test_it_runs_once_with_the_blocks_of_the_step(losses, tmp_path):
    module = fitted(tmp_path / "with", CheckpointedBlocks(1), CompiledAhead())
    assert [replaced for _, replaced in losses] == [True]
    assert losses[0][0] > 0
    plain = fitted(tmp_path / "without", CheckpointedBlocks(1))
    for x, y in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_runs_in_the_precision_of_the_step(precision: str, monkeypatch: pytest.MonkeyPatch, tmp_path):
    mixed = []
    monkeypatch.setattr(
        compiled_ahead, "compile_ahead", lambda model, loss: mixed.append(torch.is_autocast_enabled("cpu"))
    )
    fitted(tmp_path, CompiledAhead(), precision=precision)
    assert mixed == [precision == "bf16-mixed"]


@pytest.mark.slow
def test_it_leaves_compiled_blocks_alone(losses, tmp_path):
    fitted(tmp_path, CompiledBlocks(backend="eager"), CompiledAhead())
    assert losses == []


def test_on_a_cpu_there_is_nothing_to_compile():
    def never() -> Tensor:
        raise AssertionError

    compiled_ahead.compile_ahead(torch.nn.Linear(2, 2), never)
    compiled_ahead.compile_ahead(torch.nn.Identity(), never)


@pytest.mark.gpu
def test_the_first_step_compiles_nothing_and_computes_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = LanguageModel(Uniform(GatedDeltaNet), vocab_size=50, hidden_size=160, num_heads=5, num_layers=2).cuda()
    tokens = torch.randint(50, (2, 301), device="cuda")

    def loss() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return total_loss(model, tokens[:, :-1], tokens[:, 1:])

    state = torch.cuda.get_rng_state()
    compiled_ahead.compile_ahead(model, loss)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **told: compiled.append(str(told["src"].name)))
    loss().backward()
    assert compiled == []
    first = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    loss().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), first, strict=True) if p.grad is not None)
