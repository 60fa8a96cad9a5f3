"""Training with compiled blocks: one code for all blocks of a kind, and nobody else sees it."""

import shutil
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from torch._inductor import config as inductor

import mixers
from kernels import UserError
from tests.commands import Command
from tests.zoo.tiny import VOCAB, At, ResumableLoader, trainer, validation_loader
from zoo.lm.model import LanguageModel
from zoo.lm.stack import H1
from zoo.train.callbacks.compiled_blocks import CompiledBlocks, compiled_blocks
from zoo.train.module import Pretraining
from zoo.train.optim import Optimisation


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


class Watch(L.Callback):
    """Which blocks run compiled, and what the losses are."""

    def __init__(self) -> None:
        self.training, self.validating, self.losses = [], [], []

    def on_before_backward(self, trainer, pl_module, loss):
        self.training += ["forward" in vars(block) for block in pl_module.model.layers]
        self.losses.append(float(loss.detach()))

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.validating += ["forward" in vars(block) for block in pl_module.model.layers]


def module() -> Pretraining:
    torch.manual_seed(0)
    stack = H1(mixers.get("GatedDeltaNet"), mixers.get("RetNet"))
    model = LanguageModel(stack, vocab_size=VOCAB, hidden_size=16, num_heads=2, num_layers=4)
    optim = Optimisation(warmup_steps=2, learning_rate=1e-2, schedule="constant")
    return Pretraining(model, optim, config={"model": {}})


def fitted(
    folder: Path, *callbacks: L.Callback, steps: int = 4, checkpoint: Path | None = None
) -> tuple[Pretraining, Watch]:
    watch, found = Watch(), module()
    run = trainer(folder, [watch, *callbacks], max_steps=steps)
    run.fit(found, ResumableLoader(8), validation_loader(), ckpt_path=checkpoint)
    return found, watch


@pytest.mark.slow
def test_steps_are_compiled_once_for_each_kind_of_block(tmp_path: Path):
    torch._dynamo.reset()
    counting = Counting()
    plain, expected = fitted(tmp_path / "plain")
    compiled, watch = fitted(tmp_path / "compiled", CompiledBlocks(counting))
    assert counting.graphs == 3  # two kinds, and the first block, to whose input nothing is added
    assert all(watch.training)
    assert len(watch.training) == 4 * 4
    assert watch.validating
    assert not any(watch.validating + expected.training)
    assert not any("forward" in vars(block) for block in compiled.model.layers)
    assert watch.losses == pytest.approx(expected.losses, rel=1e-5)
    for (name, one), (other_name, other) in zip(plain.state_dict().items(), compiled.state_dict().items(), strict=True):
        assert name == other_name
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_run_goes_on_compiled_or_not(tmp_path: Path, first: bool):
    torch._dynamo.reset()
    _, whole = fitted(tmp_path / "whole", steps=6)
    callbacks = [CompiledBlocks(Counting())]
    fitted(tmp_path / "part", *(callbacks if first else []), steps=3)
    last = tmp_path / "part" / "checkpoints" / "last.ckpt"
    _, rest = fitted(tmp_path / "part", *([] if first else callbacks), steps=6, checkpoint=last)
    assert rest.losses == pytest.approx(whole.losses[3:], rel=1e-5)
    assert any(rest.training) == (not first)


@pytest.mark.slow
def test_what_stops_a_run_leaves_no_compiled_blocks(tmp_path: Path):
    found = module()
    with pytest.raises(RuntimeError, match="stop"):
        trainer(tmp_path, [At(1, RuntimeError("stop")), CompiledBlocks(Counting())]).fit(
            found, ResumableLoader(8), validation_loader()
        )
    assert not any("forward" in vars(block) for block in found.model.layers)


def test_without_a_compiler(tmp_path: Path):
    message = r"compile: true needs a C\+\+ compiler on a CPU; install g\+\+"
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(UserError, match=message):
        fitted(tmp_path, CompiledBlocks())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_one_overlay_compiles_a_run(backend: str, command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    counting = Counting()
    if backend == "eager":
        monkeypatch.setattr(
            "zoo.train.callbacks.compiled_blocks.compiled_blocks", lambda model, _: compiled_blocks(model, counting)
        )
    small = ("--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=1", "--samples.prompts=[]")
    command(
        "fit", "--config", "linear_attention.yaml", "--config", "tiny.yaml", "--config", "train/compile.yaml", *small
    ).ok()
    (folder,) = (desk / "runs").iterdir()
    assert yaml.safe_load((folder / "config.yaml").read_text())["compile"] is True
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert not [name for name in saved if "_orig_mod" in name]
    assert (counting.graphs > 0) == (backend == "eager")
    assert command("fit", "--resume", str(folder), "--trainer.max_steps=5", "--compile=false").code == 0
