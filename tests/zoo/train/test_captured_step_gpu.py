"""Runs in captured steps on a GPU: losses and parameters equal those of eager runs to the bit."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from reproductions.step_times import StepTimes
from tests.zoo.tiny import LossLog, ResumableLoader, assert_same_parameters, trainer
from zoo import config as configs
from zoo.data.batch import Batch
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.callbacks.captured_steps import CapturedSteps
from zoo.train.callbacks.checkpoints import Checkpoints
from zoo.train.callbacks.loss_guard import LossGuard
from zoo.train.callbacks.throughput import Throughput
from zoo.train.captured_step import CapturedStep
from zoo.train.module import Pretraining
from zoo.train.muon import Muon
from zoo.train.optim import Optimisation

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

STEPS, BAD, VOCAB = 20, 9, 64
SIZES = ("model.hidden_size=128", "model.num_heads=2", "model.num_layers=3", f"model.vocab_size={VOCAB}")


class Rows(ResumableLoader):
    """Batch n is a function of n: 4 rows of 128 tokens."""

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.length:
            self.position += 1
            yield rows(self.position)
        self.position = 0


def rows(number: int) -> Batch:
    tokens = torch.randint(VOCAB, (4, 129), generator=torch.Generator().manual_seed(number))
    labels = tokens[:, 1:].clone()
    labels[0, : number % 50] = -100
    return Batch(tokens[:, :-1], labels, None)


class Mixed(ResumableLoader):
    """Batches of 128, 64 and 32 tokens a row, in changing order."""

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.length:
            self.position += 1
            tokens, labels, _ = rows(self.position)
            length = 128 >> (self.position * self.position % 7 % 3)
            yield Batch(tokens[:, :length], labels[:, :length], None)
        self.position = 0


class Packed(ResumableLoader):
    """One row of documents, whose number and boundaries change."""

    length_of_row, mean = 2048, 150

    def __iter__(self) -> Iterator[Batch]:
        while self.position < self.length:
            self.position += 1
            yield self.row(self.position)
        self.position = 0

    def row(self, number: int) -> Batch:
        T, generator = self.length_of_row, torch.Generator().manual_seed(number)
        count = max(1, T // self.mean + 4 * (number % 3 - 1))
        cuts = torch.randint(T, (count,), generator=generator).sort().values
        cuts[::3] = cuts[::3] // 64 * 64  # on the edges of chunks; some documents are empty
        bounds = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([T])]).int()
        tokens = torch.randint(VOCAB, (1, T + 1), generator=generator)
        return Batch(tokens[:, :-1], tokens[:, 1:].clone(), bounds)


class Long(Packed):
    """A row of 16,384 tokens with documents of up to 4,000."""

    length_of_row, mean = 16384, 1000


class Short(Packed):
    """Documents of at most 64 tokens: the gradient of q in FlashAttention then repeats to the bit."""

    def row(self, number: int) -> Batch:
        tokens, labels, _ = super().row(number)
        lengths = torch.randint(1, 65, (100,), generator=torch.Generator().manual_seed(number))
        ends = lengths.cumsum(0)
        return Batch(tokens, labels, torch.cat([torch.tensor([0]), ends[ends < 2048], torch.tensor([2048])]).int())


class Spoil(L.Callback):
    """Makes the gradients of one step infinite."""

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        if trainer.global_step == BAD:
            loss.register_hook(lambda gradient: gradient * float("inf"))


def fitted(
    folder: Path,
    config: str,
    *callbacks: L.Callback,
    steps: int = STEPS,
    resume: Path | None = None,
    optim: dict[str, Any] | None = None,
    loader: type[ResumableLoader] = Rows,
    sizes: tuple[str, ...] = (),
    **options: Any,
) -> tuple[Pretraining, dict[int, float], LossGuard]:
    torch.manual_seed(0)
    model = configs.build(config, *SIZES, *sizes)
    settings = {
        "schedule": "inverse_sqrt",
        "warmup_steps": 4,
        "learning_rate": 3e-3,
        "gradient_clip": 0.5,
        **(optim or {}),
    }
    module = Pretraining(model, Optimisation(**settings), config={"model": {}}, context_length=128)
    log, guard = LossLog(), LossGuard()
    run = trainer(
        folder,
        [StepTimes(), Spoil(), guard, log, *callbacks],
        max_steps=steps,
        checkpoints=Checkpoints(every_n_steps=10),
        **{"accelerator": "gpu", "devices": 1, "precision": "bf16-mixed", "val_check_interval": 7, **options},
    )
    run.fit(module, loader(400), loader(2), ckpt_path=resume)
    return module, log.losses, guard


class Seen(CapturedSteps):
    """Remembers the captured step, which is dropped at the end."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.step, self.scores = pl_module.captured, pl_module.captured_scores


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_deltanet": ("gated_deltanet.yaml", {}),
    "gla": ("gla.yaml", {}),
    "mamba2": ("mamba2.yaml", {}),
    "h2": ("gdn_h2.yaml", {}),
    "h2 recomputed": ("gdn_h2.yaml", {"recomputed": True}),
    "attention": ("transformer.yaml", {}),
    "accumulation": ("gated_deltanet.yaml", {"accumulate_grad_batches": 3}),
    "fp32": ("gated_deltanet.yaml", {"precision": "32-true"}),
    "bf16": ("gated_deltanet.yaml", {"precision": "bf16-true"}),
    "muon": ("gated_deltanet.yaml", {"optim": {"optimizer": Muon}}),
}


@pytest.mark.parametrize("case", CASES)
def test_captured_runs_are_eager_runs(case: str, tmp_path: Path):
    config, options = CASES[case][0], dict(CASES[case][1])
    callbacks = [CheckpointedBlocks(1)] if options.pop("recomputed", False) else []
    eager, expected, guard = fitted(tmp_path / "eager", config, *callbacks, **options)
    watch = Seen()
    captured, losses, other_guard = fitted(tmp_path / "captured", config, *callbacks, watch, **options)
    assert watch.step.refused is None
    assert watch.scores.refused is None
    assert watch.step.parts == 5 + 2 * (case == "accumulation")
    assert captured.loss_by_position == pytest.approx(eager.loss_by_position, rel=1e-6)
    assert losses == expected
    assert_same_parameters(eager, captured)
    assert guard.skipped == other_guard.skipped == 1


@pytest.mark.parametrize("batches", [1, 3])
def test_batches_of_several_lengths_are_captured(batches: int, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    options = {"loader": Mixed, "accumulate_grad_batches": batches}
    eager, expected, _ = fitted(tmp_path / "eager", "gated_deltanet.yaml", **options)
    watch = Seen()
    with caplog.at_level(logging.WARNING):
        captured, losses, _ = fitted(tmp_path / "captured", "gated_deltanet.yaml", watch, **options)
    assert [line for line in caplog.messages if line.startswith("cuda_graph")] == []
    assert watch.step.parts == 3 + 2 * 3 * (1 if batches == 1 else 2)
    assert losses == expected
    assert_same_parameters(eager, captured)


WIDE = ("model.hidden_size=256",)  # heads of 128 channels: kernels in Gluon
# PyTorch's gradient of the embeddings of 16,384 tokens does not repeat to the bit, in eager steps either
WITHOUT_EMBEDDINGS = {"train_only": ["layers.*", "norm.*", "lm_head.*"]}
PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "gated_deltanet": ("gated_deltanet.yaml", {}),
    "gated_deltanet 128": ("gated_deltanet.yaml", {"sizes": WIDE}),
    "gla": ("gla.yaml", {}),
    "gla 128": ("gla.yaml", {"sizes": WIDE}),
    "mamba2": ("mamba2.yaml", {}),
    "h2": ("gdn_h2.yaml", {}),
    "attention": ("transformer.yaml", {"loader": Short}),
    "long": ("gated_deltanet.yaml", {"loader": Long, "sizes": WIDE, "optim": WITHOUT_EMBEDDINGS}),
    "long mamba2": ("mamba2.yaml", {"loader": Long, "optim": WITHOUT_EMBEDDINGS}),
    "accumulation": ("gated_deltanet.yaml", {"accumulate_grad_batches": 3}),
    "recomputed": ("gated_deltanet.yaml", {"recomputed": True}),
}


@pytest.mark.parametrize("case", PACKED)
def test_packed_documents_are_captured(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    config, options = PACKED[case]
    options = {"loader": Packed, **options}
    callbacks = [CheckpointedBlocks(1)] if options.pop("recomputed", False) else []
    eager, expected, _ = fitted(tmp_path / "eager", config, *callbacks, **options)
    watch = Seen()
    with caplog.at_level(logging.WARNING):
        captured, losses, _ = fitted(tmp_path / "captured", config, *callbacks, watch, **options)
    assert [line for line in caplog.messages if line.startswith("cuda_graph")] == []
    assert watch.step.refused is None
    assert watch.scores.refused is None
    assert watch.step.parts >= 5
    assert losses == expected
    assert_same_parameters(eager, captured)
    ends = 4 if options["loader"] is Short else 8  # no document reaches the second half of the 128 positions
    assert captured.loss_by_position[:ends] == pytest.approx(eager.loss_by_position[:ends], rel=1e-6)
    assert all(map(math.isnan, captured.loss_by_position[ends:]))


def test_packed_steps_do_not_wait_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls, step = [], CapturedStep.__call__

    def watched(*args: Any, **named: Any) -> Any:
        calls.append(1)
        torch.cuda.set_sync_debug_mode("error" if len(calls) > 6 else "default")  # all shapes are captured by then
        try:
            return step(*args, **named)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(CapturedStep, "__call__", watched)
    watch = Seen()
    fitted(tmp_path, "gated_deltanet.yaml", watch, loader=Packed)
    assert watch.step.parts >= 3 + 2 * 2  # at least two shapes
    assert len(calls) == STEPS


def test_a_run_is_continued_captured_or_not(tmp_path: Path):
    eager, expected, _ = fitted(tmp_path / "eager", "gated_deltanet.yaml")
    for name, before, after in (("captured", [CapturedSteps()], [CapturedSteps()]), ("mixed", [CapturedSteps()], [])):
        fitted(tmp_path / name, "gated_deltanet.yaml", *before, steps=12)
        last = tmp_path / name / "checkpoints" / "last.ckpt"
        module, losses, _ = fitted(tmp_path / f"{name} 2", "gated_deltanet.yaml", *after, resume=last)
        assert losses == {step: expected[step] for step in range(13, 21)}
        assert_same_parameters(eager, module)


def test_a_step_that_waits_for_the_device_runs_eagerly(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Waiting(CapturedSteps):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            super().on_train_start(trainer, pl_module)
            forward = pl_module.model.layers[0].mixer.forward
            pl_module.model.layers[0].mixer.forward = lambda x, *args, **kwargs: forward(
                x + 0 * x.sum().item(), *args, **kwargs
            )

    eager, expected, _ = fitted(tmp_path / "eager", "gated_deltanet.yaml", steps=4)
    with caplog.at_level(logging.WARNING):
        waiting, losses, _ = fitted(tmp_path / "waiting", "gated_deltanet.yaml", Waiting(), steps=4)
    lines = [line for line in caplog.messages if line.startswith("cuda_graph")]
    assert len(lines) == 1
    assert lines[0].startswith("cuda_graph: the training step runs eagerly: ")
    assert losses == pytest.approx(expected, rel=1e-2)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


class NoWaiting(L.Callback):
    """Makes everything fail that waits for the GPU between the starts of two steps."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.checked = first, last, 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.checked += self.first <= trainer.global_step < self.last
        checks = self.first <= trainer.global_step < self.last
        torch.cuda.set_sync_debug_mode("error" if checks else "default")

    def on_exception(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("loader", [Rows, Mixed])
def test_steps_that_are_not_logged_do_not_wait_for_the_device(loader: type[ResumableLoader], tmp_path: Path):
    """The whole loop: batches, hooks, guard, metrics."""
    torch.manual_seed(0)
    module = Pretraining(configs.build("gated_deltanet.yaml", *SIZES), Optimisation(), config={"model": {}})
    watch, checks = Seen(), NoWaiting(8, 18)
    options = {"accelerator": "gpu", "devices": 1, "precision": "bf16-mixed", "log_every_n_steps": 100}
    callbacks = [StepTimes(), LossGuard(), Throughput(), watch, checks]
    run = trainer(tmp_path, callbacks, max_steps=20, checkpoints=Checkpoints(), val_check_interval=100, **options)
    run.fit(module, loader(400), loader(2))
    assert watch.step.refused is None
    assert checks.checked == 10
