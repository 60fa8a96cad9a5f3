"""`fp8: true`: training steps in FP8; evaluation, checkpoints and everything outside the blocks as without it."""

from pathlib import Path

import lightning as L
import pytest
import torch

import mixers
from kernels import UserError
from kernels.linear import fp8
from tests.commands import Command
from tests.zoo.tiny import VOCAB, LossLog, ResumableLoader, trainer, validation_loader
from tests.zoo.train.test_captured_step import Repeated
from zoo.lm.model import LanguageModel
from zoo.lm.stack import Uniform
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.callbacks.captured_steps import CapturedSteps
from zoo.train.callbacks.fp8_products import FP8Products
from zoo.train.module import Pretraining
from zoo.train.optim import Optimisation

pytest_plugins = "tests.desk"


class Products(L.Callback):
    """The outputs of all products in FP8 since the last validation began, and in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.training, self.validating = set[tuple[int, ...]](), set[tuple[int, ...]]()
        multiply = fp8.multiplied

        def noted(a, b):
            y = multiply(a, b)
            self.shapes.append(tuple(y.shape))
            return y

        monkeypatch.setattr(fp8, "multiplied", noted)

    def on_validation_start(self, trainer, pl_module):
        self.training |= {*self.shapes}
        self.shapes.clear()

    def on_validation_end(self, trainer, pl_module):
        self.validating |= {*self.shapes}
        self.shapes.clear()


def fitted(folder: Path, *callbacks: L.Callback, size: int = 256, **options) -> tuple[Pretraining, LossLog]:
    torch.manual_seed(0)
    stack = Uniform(mixers.get("GatedDeltaNet"))
    model = LanguageModel(stack, vocab_size=VOCAB, hidden_size=size, num_heads=2, num_layers=1)
    optim = Optimisation(warmup_steps=2, learning_rate=1e-3, schedule="constant")
    trained, log = Pretraining(model, optim, config={"model": {}}), LossLog()
    run = trainer(folder, [log, *callbacks], max_steps=4, **{"precision": "bf16-mixed"} | options)
    run.fit(trained, ResumableLoader(4), validation_loader())
    return trained, log


def test_steps_in_fp8_and_evaluation_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain, expected = fitted(tmp_path / "plain")
    products = Products(monkeypatch)
    quick, log = fitted(tmp_path / "fp8", products, FP8Products())
    assert not products.validating
    wide = 4 * 256  # queries, keys, values and output gates; the gates of heads are narrow
    outputs, inputs = {(64, wide), (64, 256), (64, 2 * 768)}, {(64, 256), (64, 768)}
    weights = {(wide, 256), (256, 256), (2 * 768, 256), (256, 768)}
    assert products.training == outputs | inputs | weights
    assert log.losses == pytest.approx(expected.losses, rel=0.02)
    assert {*log.losses.values()}.isdisjoint(expected.losses.values())
    state, other = quick.state_dict(), plain.state_dict()
    assert {name: (x.shape, x.dtype) for name, x in state.items()} == {
        name: (x.shape, x.dtype) for name, x in other.items()
    }


@pytest.mark.parametrize("callback", [CapturedSteps, CheckpointedBlocks])
def test_captured_and_checkpointed_steps_are_the_same(callback: type[L.Callback], tmp_path: Path):
    plain, log = fitted(tmp_path / "fp8", FP8Products())
    recorder = Repeated()
    further = CapturedSteps(recorder) if callback is CapturedSteps else CheckpointedBlocks()
    other, other_log = fitted(tmp_path / "other", FP8Products(), further)
    assert log.losses == other_log.losses
    assert all(torch.equal(x, y) for x, y in zip(plain.parameters(), other.parameters(), strict=True))
    assert recorder.replayed == 0 or callback is CapturedSteps
    assert recorder.replayed or callback is not CapturedSteps


def test_runs_without_fp8(tmp_path: Path):
    with pytest.raises(UserError, match=r"^fp8: true needs trainer\.precision bf16-mixed or bf16-true, not 32-true$"):
        fitted(tmp_path, FP8Products(), precision="32-true")
    with pytest.raises(UserError, match=r"^fp8: true has no effect on this model, whose blocks have no large linear"):
        fitted(tmp_path, FP8Products(), size=64)


@pytest.mark.slow
def test_from_the_command_line(command: Command, desk: Path):
    run = ("fit", "--config", "gla.yaml", "--config", "tiny.yaml", "--config", "train/fp8.yaml")
    for key in ("compile", "deterministic_kernels"):
        done = command(*run, f"--{key}=true")
        assert f"error: fp8: true cannot be combined with {key}: true; set one of them to false" in done.err
    wide = ("--config", "train/bf16.yaml", "--model.hidden_size=256", "--model.num_layers=1", "--samples.prompts=[]")
    done = command(*run, *wide, "--data.sequence_length=33")
    assert done.code == 2
    assert "error: fp8: 66 tokens in a batch are not a multiple of 16" in done.err
    assert command(*run, *wide).code == 0
