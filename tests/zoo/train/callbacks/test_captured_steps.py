"""Runs in captured steps: the same as eager runs, for the whole of what happens around a step."""

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from tests.zoo.tiny import (
    VOCAB,
    At,
    Batches,
    LossLog,
    ResumableLoader,
    assert_same_parameters,
    pretraining,
    trainer,
    validation_loader,
)
from tests.zoo.train.test_captured_step import Repeated
from zoo.data.batch import Batch
from zoo.lm.classifier import Classifier
from zoo.train.callbacks.captured_steps import CapturedSteps, obstacle
from zoo.train.callbacks.loss_guard import LossGuard
from zoo.train.callbacks.throughput import Throughput
from zoo.train.metrics_file import read_metrics
from zoo.train.module import Pretraining

# of the machine and of all that this process has done before
MEASURED = ("tokens_per_second", "seconds_per_step", "minutes_left", "peak_memory_gib")


class Spoil(L.Callback):
    """Makes the gradients of the fifth step infinite, and notes the order of the hooks."""

    def __init__(self) -> None:
        self.hooks: list[str] = []

    def on_before_zero_grad(self, *_: Any) -> None:
        self.hooks.append("zero")

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor) -> None:
        self.hooks.append("before backward")
        if trainer.global_step == 4:
            loss.register_hook(lambda gradient: gradient * float("inf"))

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.hooks.append(f"after backward {max(p.grad.abs().max().item() for p in pl_module.model.parameters()):.6g}")

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.hooks.append("before update")


def fitted(
    folder: Path, *callbacks: L.Callback, steps: int = 12, resume: Path | None = None, **options: Any
) -> tuple[Pretraining, dict[int, float], list[str], LossGuard]:
    torch.manual_seed(0)  # of the steps' random numbers
    module, log, spoil, guard = pretraining(dropout=0.2, schedule="constant"), LossLog(), Spoil(), LossGuard()
    run = trainer(folder, [spoil, guard, log, *callbacks], max_steps=steps, **options)
    run.fit(module, ResumableLoader(60), validation_loader(), ckpt_path=resume)
    return module, log.losses, spoil.hooks, guard


@pytest.mark.parametrize("batches", [1, 3])
def test_a_captured_run_is_the_eager_run(batches: int, tmp_path: Path):
    eager, losses, hooks, guard = fitted(tmp_path / "eager", accumulate_grad_batches=batches)
    recorder = Repeated()
    captured, *others, other_guard = fitted(
        tmp_path / "captured", CapturedSteps(recorder), accumulate_grad_batches=batches
    )
    assert recorder.replayed >= 2 * 12 * batches
    assert_same_parameters(eager, captured)
    assert captured.loss_by_position == eager.loss_by_position
    assert others == [losses, hooks]
    assert guard.skipped == other_guard.skipped == 1
    assert captured.captured is None  # its memory is free for what follows


class Watched(Repeated):
    """Notes which replays exist, without keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self.replays: list[weakref.ref[Any]] = []

    def record(self, step: Callable[[], Any]) -> Callable[[], Any]:
        replay = super().record(step)
        self.replays.append(weakref.ref(replay))
        return replay


def test_no_graph_is_left_when_a_run_ends(tmp_path: Path):
    recorder = Watched()
    gc.disable()  # an automatic collection would free the graphs, too
    try:
        fitted(tmp_path, CapturedSteps(recorder), steps=3)
        left = [replay() is not None for replay in recorder.replays]
    finally:
        gc.enable()
    assert left == [False] * 4  # two passes, norm and clipping


def test_a_run_is_continued_captured_or_not(tmp_path: Path):
    eager, losses, *_ = fitted(tmp_path / "eager")
    for before, after in (([CapturedSteps(Repeated())], []), ([], [CapturedSteps(Repeated())])):
        folder = tmp_path / f"captured {len(before)}"
        fitted(folder, *before, steps=7)
        last = folder / "checkpoints" / "last.ckpt"
        module, more, *_ = fitted(folder / "continued", *after, resume=last)
        assert more == {step: losses[step] for step in range(8, 13)}
        assert_same_parameters(eager, module)


def test_what_is_logged_does_not_depend_on_it(tmp_path: Path):
    rows = []
    for name, callbacks in (("eager", []), ("captured", [CapturedSteps(Repeated())])):
        run = [Throughput(), *callbacks]
        fitted(tmp_path / name, *run, accumulate_grad_batches=2, log_every_n_steps=3)
        rows.append(read_metrics(tmp_path / name / "metrics.jsonl"))
    eager, captured = ([{key: row[key] for key in row if key not in MEASURED} for row in each] for each in rows)
    assert eager == captured
    assert [row["step"] for row in captured if "learning_rate" in row] == [2, 5, 8, 11]
    assert [row.keys() for row in rows[0]] == [row.keys() for row in rows[1]]


def test_a_run_that_ends_in_an_error_keeps_no_graphs(tmp_path: Path):
    module, callbacks = pretraining(), [CapturedSteps(Repeated()), At(2, RuntimeError("a bug"))]
    with pytest.raises(RuntimeError, match="a bug"):
        trainer(tmp_path, callbacks).fit(module, ResumableLoader(8), validation_loader())
    assert module.captured is None


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("cuda_graph")]


def test_on_a_cpu_the_run_is_eager_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        module, losses, *_ = fitted(tmp_path / "captured", CapturedSteps(), steps=3)
    reason = "the device is a cpu, and CUDA graphs need an NVIDIA GPU"
    assert lines(caplog) == [f"cuda_graph: the training step runs eagerly: {reason}"]
    eager, expected, *_ = fitted(tmp_path / "eager", steps=3)
    assert losses == expected
    assert_same_parameters(eager, module)


class Packed(ResumableLoader):
    """Batches of one row of one to three documents."""

    def __iter__(self) -> Iterator[Batch]:
        for tokens, labels, _ in super().__iter__():
            n = self.position % 5
            bounds = [0, *([3 + n] if n else []), *([11, 11] if n > 2 else []), 16]
            yield Batch(tokens[:1], labels[:1], torch.tensor(bounds, dtype=torch.int32))


class Seen(CapturedSteps):
    """Remembers the graphs, which are dropped at the end."""

    def __init__(self, recorder: Repeated) -> None:
        super().__init__(recorder)
        self.recorder = recorder

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.parts, self.scores = pl_module.captured.parts, pl_module.captured_scores


@pytest.mark.parametrize("batches", [1, 3])
def test_packed_documents_are_captured(batches: int, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    found, watch = [], Seen(Repeated())
    for name, callbacks in (("eager", []), ("captured", [watch])):
        torch.manual_seed(0)
        module, log = pretraining(dropout=0.2), LossLog()
        run = trainer(tmp_path / name, [log, *callbacks], max_steps=10, accumulate_grad_batches=batches)
        with caplog.at_level(logging.WARNING):
            run.fit(module, Packed(60), Batches(*Packed(6)))
        found.append((module, log.losses))
    (eager, expected), (captured, losses) = found
    assert [line for line in lines(caplog) if "passes are captured" not in line] == []
    assert losses == expected
    # norm and clipping, and passes for one, two and up to four documents
    assert watch.parts == 2 + 2 * 3 * (1 if batches == 1 else 2)
    assert watch.scores.refused is None
    assert watch.recorder.recorded == watch.parts + 3  # validation
    assert captured.loss_by_position == eager.loss_by_position
    assert_same_parameters(eager, captured)


def test_packed_sequences_with_one_label_each_are_eager_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    recorder, module = Repeated(), pretraining()
    module.model.head = Classifier(8, VOCAB)
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path, [CapturedSteps(recorder)], max_steps=2).fit(module, Packed(8))
    assert lines(caplog)[-1].endswith(
        "the training step runs eagerly: the number of labels is that of packed sequences"
    )
    assert recorder.recorded == 0


def test_what_a_replay_would_leave_out_is_not_captured(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    module = pretraining()
    module.model.head.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.WARNING):
        trainer(tmp_path / "hook", [CapturedSteps(Repeated())], max_steps=1).fit(module, ResumableLoader(8))
        run = trainer(tmp_path / "anomaly", [CapturedSteps(Repeated())], max_steps=1, detect_anomaly=True)
        run.fit(pretraining(), ResumableLoader(8))
    assert [line.rpartition(": ")[2] for line in lines(caplog)] == [
        "head has a hook, which a replay would not call",
        "trainer.detect_anomaly reads every gradient on the host",
    ]


def test_expandable_segments_that_nccl_would_register_are_not_captured(monkeypatch: pytest.MonkeyPatch):
    precision = SimpleNamespace(scaler=None)
    run: Any = SimpleNamespace(strategy=DDPStrategy(), world_size=2, precision_plugin=precision)
    model = pretraining().model
    assert obstacle(run, model) is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert (obstacle(run, model) or "").endswith("requires NCCL_GRAPH_REGISTER=0")
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
    assert obstacle(run, model) is None


@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"])
def test_automatic_capture_leaves_runs_with_other_hooks_eager(
    hook: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """One line names the hook; `cuda_graph: true` captures the run."""
    other, recorder = type("Other", (L.Callback,), {hook: lambda *_: None}), Repeated()
    with caplog.at_level(logging.WARNING):
        run = trainer(tmp_path / "automatic", [other(), LossGuard(), CapturedSteps(recorder, automatic=True)])
        run.fit(pretraining(), ResumableLoader(8))
    reason = f"Other.{hook} is called within it; cuda_graph: true calls it between replays"
    assert lines(caplog) == [f"cuda_graph: the training step runs eagerly: {reason}"]
    assert recorder.recorded == 0
    trainer(tmp_path / "true", [other(), CapturedSteps(recorder)]).fit(pretraining(), ResumableLoader(8))
    assert recorder.recorded > 0


def test_automatic_capture_sees_hooks_of_modules_and_instances(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    class Module(Pretraining):
        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            super().backward(loss, *args, **kwargs)

    plain, recorder = pretraining(), Repeated()
    module = Module(plain.model, plain.optim, config=plain.config)
    hooks = L.pytorch.callbacks.LambdaCallback(on_before_backward=lambda *_: None)
    with caplog.at_level(logging.WARNING):
        for name, each, callbacks in (("module", module, []), ("lambda", pretraining(), [hooks])):
            run = trainer(tmp_path / name, [*callbacks, CapturedSteps(recorder, automatic=True)])
            run.fit(each, ResumableLoader(8))
    named = [line.split(": ")[2].split()[0] for line in lines(caplog)]
    assert named == ["Module.backward", "LambdaCallback.on_before_backward"]


def test_automatic_capture(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """It captures a run with this project's callbacks and hooks around the step, and is silent on a CPU."""
    around = type("Around", (L.Callback,), {"on_train_batch_end": lambda *_: None})
    recorder = Repeated()
    with caplog.at_level(logging.WARNING):
        for each in (recorder, None):
            run = trainer(tmp_path / str(each is None), [around(), LossGuard(), CapturedSteps(each, automatic=True)])
            run.fit(pretraining(), ResumableLoader(8))
    assert recorder.recorded > 0
    assert [line for line in lines(caplog) if "passes are captured" not in line] == []


def test_an_optimiser_that_is_not_captured_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        module = pretraining(optimizer=lambda groups, lr: torch.optim.SGD(groups, lr))
        trainer(tmp_path, [CapturedSteps(Repeated())], max_steps=2).fit(module, ResumableLoader(8))
    assert lines(caplog) == ["cuda_graph: the update of SGD runs eagerly; forward and backward passes are captured"]
