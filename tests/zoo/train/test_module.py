import math
import os
import random
import signal
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from safetensors.torch import save_file

from kernels.errors import UserError
from tests.zoo.tiny import (
    VOCAB,
    At,
    Batches,
    ByteTokenizer,
    LossLog,
    ResumableLoader,
    batch,
    pretraining,
    trainer,
    validation_loader,
)
from tests.zoo.train.test_captured_step import Repeated
from zoo.checkpoints.archive import save_sealed
from zoo.checkpoints.signature import is_own
from zoo.data.batch import Batch
from zoo.train.callbacks.captured_steps import CapturedSteps
from zoo.train.callbacks.checkpoints import Checkpoints
from zoo.train.metrics import ContextLoss, TaskMeans, label_scores, token_losses
from zoo.train.module import best_precision


class Uniform(torch.nn.Module):
    """Logits that depend on the token alone, so that losses can be computed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(VOCAB * VOCAB).view(VOCAB, VOCAB).remainder(7).float())

    def forward(self, tokens, state=None, *, cu_seqlens=None):
        return self.table[tokens], None


def test_losses_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0], [5.0, 1.0]]])
    losses = token_losses(logits.bfloat16().double(), torch.tensor([[1, 0, -100]]))
    torch.testing.assert_close(losses, torch.tensor([[math.log(4 / 3), math.log(2), 0.0]]), atol=2e-3, rtol=0)
    assert losses.dtype == torch.float32


def test_context_loss_weights_by_tokens_and_buckets_by_position():
    metric = ContextLoss(context_length=4, buckets=2)
    labels = torch.tensor([[0, 0, 0, 0, -100, 0]])
    losses = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0, 6.0]])
    metric.update(losses, labels, torch.tensor([0, 4, 6], dtype=torch.int32))
    metric.update(torch.tensor([[10.0]]), torch.tensor([[0]]), None)
    loss, by_position = metric.compute()
    assert loss.item() == pytest.approx(26 / 6)
    assert by_position.tolist() == pytest.approx([(1 + 2 + 6 + 10) / 4, 3.5])


def test_positions_beyond_the_context_count_in_the_last_bucket():
    metric = ContextLoss(context_length=2, buckets=2)
    metric.update(torch.tensor([[1.0, 2.0, 4.0]]), torch.zeros(1, 3, dtype=torch.int64), None)
    assert metric.compute()[1].tolist() == [1.0, 3.0]


class Choosing(torch.nn.Module):
    """A model of three tokens that has its choice made."""

    def __init__(self, likeliest: torch.Tensor):
        super().__init__()
        self.likeliest = likeliest

    def forward(self, tokens: torch.Tensor, cu_seqlens: torch.Tensor | None = None):
        return torch.nn.functional.one_hot(self.likeliest, 3).float(), None


def test_accuracy_by_task():
    metric = TaskMeans(3, torch.int64)
    model = Choosing(torch.tensor([[1, 2, 0, 2]]))
    for labels, task in ((torch.tensor([[1, 0, -100, 2]]), 0), (torch.tensor([[-100, 2, -100, -100]]), 2)):
        _, correct = label_scores(model, model.likeliest, labels)
        metric.update(correct, labels, task)
    accuracy, by_task = metric.compute()
    assert accuracy == 3 / 4
    torch.testing.assert_close(by_task, torch.tensor([2 / 3, float("nan"), 1.0]), equal_nan=True)


def test_unnamed_loaders_are_counted_together(tmp_path):
    module = pretraining()
    module.eval()
    loaders = [validation_loader(), Batches(batch(7))]
    run = trainer(tmp_path, max_steps=1)
    run.validate(module, loaders, verbose=False)
    batches = [b for loader in loaders for b in loader]
    correct = [(module(b.tokens).argmax(-1) == b.labels).float().mean().item() for b in batches]
    assert run.callback_metrics["val_accuracy"].item() == pytest.approx(sum(correct) / 3)
    assert not [name for name in run.callback_metrics if name.startswith("val_accuracy_")]


def test_training_and_validation_loss_ignore_what_has_no_label(tmp_path):
    tokens, labels = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[2, -100, 4, 5, -100]])
    packed = Batch(tokens, labels, torch.tensor([0, 2, 5], dtype=torch.int32))
    module = pretraining(learning_rate=1e-9)
    module.model = Uniform()
    by_hand = -sum(module.model.table[t].log_softmax(-1)[n].item() for t, n in ((1, 2), (3, 4), (4, 5))) / 3
    run = trainer(tmp_path, [log := LossLog()], max_steps=4)
    run.fit(module, Batches(packed, packed, packed, packed), Batches(packed))
    assert log.losses[1] == pytest.approx(by_hand, rel=1e-6)
    assert run.callback_metrics["val_loss"].item() == pytest.approx(by_hand, rel=1e-5)
    assert run.callback_metrics["val_perplexity"].item() == pytest.approx(math.exp(by_hand), rel=1e-5)
    assert module.loss_by_position[0] == pytest.approx(
        -(module.model.table[1].log_softmax(-1)[2] + module.model.table[3].log_softmax(-1)[4]).item() / 2, rel=1e-5
    )  # position 0 of the two documents
    assert len(module.loss_by_position) == 8


def test_a_batch_without_any_label_does_not_break_the_run(tmp_path, caplog):
    empty = batch(0)._replace(labels=torch.full((4, 16), -100))
    run = trainer(tmp_path, [log := LossLog()], max_steps=3)
    run.fit(module := pretraining(), Batches(batch(0), empty, empty), validation_loader())
    assert log.losses[2] == 0
    assert [record.message for record in caplog.records if "no label" in record.message] == [
        "data: a batch has no label but -100, so that nothing is learned from it"
    ]
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_test_and_predict(tmp_path):
    run = trainer(tmp_path)
    module = pretraining()
    (result,) = run.test(module, validation_loader(), verbose=False)
    unlabelled = batch(1000)._replace(labels=batch(1000).labels.clone().index_fill(1, torch.tensor([3]), -100))
    (losses,) = run.predict(module, Batches(unlabelled))
    assert losses.shape == (4, 16)
    assert losses[:, 3].isnan().all()
    whole = torch.stack(run.predict(module, validation_loader()))
    assert whole.mean().item() == pytest.approx(result["test_loss"], rel=1e-5)


def test_it_learns(tmp_path):
    run = trainer(
        tmp_path, [log := LossLog()], checkpoints=Checkpoints(every_n_steps=60), max_steps=60, val_check_interval=60
    )
    run.fit(module := pretraining(learning_rate=5e-2), ResumableLoader(100), validation_loader())
    assert log.losses[60] < log.losses[1] - 0.5
    assert module.tokens_seen == 60 * 64


def test_sums_stay_exact_when_the_module_around_them_is_cast():
    around = torch.nn.ModuleDict({"loss": ContextLoss(8)}).to(torch.bfloat16)
    labels = torch.ones(1, 8, dtype=torch.int64)
    for _ in range(3):
        around["loss"].update(torch.full((1, 8), 257.0), labels, None)  # a number that bf16 lacks
    assert around["loss"].compute()[0] == 257


def test_precision():
    assert best_precision("cpu") == "32-true"
    assert best_precision("gpu") in ("32-true", "bf16-mixed")


class Draws(L.Callback):
    """Somebody who draws random numbers during validation, and looks at those of each step."""

    def __init__(self) -> None:
        self.numbers: dict[int, tuple] = {}

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        torch.rand(7), random.random(), np.random.rand()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.numbers[trainer.global_step] = torch.rand(1).item(), random.random(), np.random.rand()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    L.seed_everything(3, verbose=False)
    log, draws, module = LossLog(), Draws(), pretraining(dropout=0.3)
    trainer(tmp_path_factory.mktemp("whole"), [log, draws]).fit(module, ResumableLoader(7), validation_loader())
    return log.losses, draws.numbers, module


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop", [1, 4, 5, 7, 11], ids=["first", "at validation", "middle", "end of epoch", "last but one"]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_a_stopped_run_continues_bitwise(tmp_path, uninterrupted, stop, number):
    losses, numbers, whole = uninterrupted
    L.seed_everything(3, verbose=False)
    log = LossLog()
    with pytest.raises(SystemExit) as exit:
        trainer(tmp_path, [log, At(stop, partial(os.kill, os.getpid(), number))]).fit(
            pretraining(dropout=0.3), ResumableLoader(7), validation_loader()
        )
    assert exit.value.code == (1 if number == signal.SIGINT else 128 + signal.SIGTERM)
    assert list(log.losses) == list(range(1, stop + 1))  # the step in progress was finished, none was begun
    L.seed_everything(99, verbose=False)  # the run's own seed counts
    rest, draws, module = LossLog(), Draws(), pretraining(dropout=0.3)
    run = trainer(tmp_path, [rest, draws])
    run.fit(module, ResumableLoader(7), validation_loader(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert log.losses | rest.losses == losses
    assert list(rest.losses) == list(range(stop + 1, 13))
    assert draws.numbers == {step: drawn for step, drawn in numbers.items() if step > stop}
    for name, tensor in whole.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert module.tokens_seen == 12 * 64


def test_a_checkpoint_holds_plain_containers_and_says_what_it_is(tmp_path):
    run = trainer(tmp_path, max_steps=4)
    run.fit(pretraining(tokenizer=ByteTokenizer()), ResumableLoader(7), validation_loader())
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert is_own(checkpoint["zoo"]["config"], checkpoint["zoo"].pop("signature"))
    assert checkpoint["zoo"] == {
        "format": 2,
        "config": {"model": {"hidden_size": 8}},
        "tokenizer": '{"bytes": true}',
        "tokens_seen": 256,
    }


def test_a_checkpoint_of_another_format(tmp_path):
    trainer(tmp_path, max_steps=3).fit(pretraining(), ResumableLoader(7), validation_loader())
    path = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["zoo"]["format"] = 99
    with path.open("wb") as file:
        save_sealed(checkpoint, file)
    with pytest.raises(UserError, match="has checkpoint format 99, but this version reads format 2"):
        trainer(tmp_path / "new").fit(pretraining(), ResumableLoader(7), validation_loader(), ckpt_path=path)


class Lossy(Uniform):
    """The same, with a loss of its own: none but that is asked of it in training."""

    def loss(self, tokens, labels, cu_seqlens=None):
        return self.table[tokens.flatten(), labels.clamp(min=0).flatten()].mul(labels.flatten() >= 0).sum()

    def forward(self, tokens, state=None, *, cu_seqlens=None):
        assert not self.training
        return super().forward(tokens, state, cu_seqlens=cu_seqlens)


def test_a_model_with_a_loss_of_its_own_is_trained_by_it(tmp_path):
    tokens, labels = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, -100, 4, 5]])
    given = Batch(tokens, labels, None)
    module = pretraining(learning_rate=1e-9)
    module.model = Lossy()
    table = module.model.table.detach()
    run = trainer(tmp_path, [log := LossLog()], max_steps=4)
    run.fit(module, Batches(given, given, given, given), Batches(given))
    assert log.losses[1] == pytest.approx((table[1, 2] + table[3, 4] + table[4, 5]).item() / 3, rel=1e-6)
    usual = torch.nn.functional.cross_entropy(table[tokens[0]], labels[0])
    assert run.callback_metrics["val_loss"].item() == pytest.approx(usual.item(), rel=1e-5)


class Logs(L.Callback):
    """Logs the number of the step, as a number of the step and of the epoch, and keeps what Lightning has of each."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        pl_module.log("number", trainer.global_step)
        pl_module.log("tensor", torch.tensor(float(trainer.global_step)))
        pl_module.log("largest", trainer.global_step, on_step=False, on_epoch=True, reduce_fx="max")
        self.seen.append(tuple(int(trainer.callback_metrics.get(name, 0)) for name in ("number", "tensor")))

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("of_the_epoch", 7)


@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_run_is_continued_with_another_number_of_batches_in_a_step(accumulated: int, tmp_path):
    steps: list[int] = []

    class Steps(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            steps.append(trainer.global_step)

    def run(number: int, max_steps: int, path: Path | None = None) -> None:
        module = pretraining()
        module.config = {"trainer": {"accumulate_grad_batches": None if number == 1 else number}}
        options = {"accumulate_grad_batches": number, "limit_val_batches": 0}
        trainer(tmp_path, [Steps()], max_steps, **options).fit(module, ResumableLoader(100), ckpt_path=path)

    run(2, 3)
    steps.clear()
    run(accumulated, 5, tmp_path / "checkpoints" / "last.ckpt")
    assert steps == {1: [4, 5], 4: [3, 3, 3, 4, 4, 4, 4, 5]}[accumulated]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_the_first_step_after_a_resume_has_the_rate_of_its_schedule(schedule: str, tmp_path):
    """The schedule has the run's present length, not the one that the checkpoint was written with."""
    rates: dict[int, float] = {}

    class Rates(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            rates[trainer.global_step] = optimizer.param_groups[0]["lr"]

    trainer(tmp_path, [Rates()], max_steps=6).fit(pretraining(schedule=schedule), ResumableLoader(100))
    module = pretraining(schedule=schedule)
    path = tmp_path / "checkpoints" / "last.ckpt"
    trainer(tmp_path, [Rates()], max_steps=40).fit(module, ResumableLoader(100), ckpt_path=path)
    expected = {step: 1e-2 * module.optim.factor(step, 6 if step < 6 else 40) for step in range(40)}
    assert rates == pytest.approx(expected)


def test_weights_that_are_not_finite_are_not_trained(tmp_path):
    module = pretraining()
    with torch.no_grad():
        module.model.mixer_weight[0, 0] = math.nan
    for name, save in (("weights.safetensors", save_file), ("weights.pt", torch.save)):
        save(module.model.state_dict(), tmp_path / name)
        message = rf"^optim\.initial_weights: .*{name} has values that are not finite in 1 of .*, first mixer_weight"
        with pytest.raises(UserError, match=message):
            trainer(tmp_path).fit(pretraining(initial_weights=str(tmp_path / name)), Batches(batch(0)))


OWN = ("tokens", "learning_rate", "gradient_norm", "train_loss")


class Reads(L.Callback):
    """Keeps the metrics of this project that Lightning has after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.seen.append({name: float(trainer.callback_metrics[name]) for name in OWN})


@pytest.mark.parametrize("captured", [False, True])
def test_metrics_between_logged_steps_are_exact(captured: bool, tmp_path):
    """Those of callbacks, and those that callbacks read, whatever the interval of the log."""
    seen, every = [], CapturedSteps(Repeated())
    for interval in (1, 100):
        options = {"log_every_n_steps": interval, "max_steps": 10, "val_check_interval": 100}
        callbacks = [logs := Logs(), reads := Reads(), *([every] if captured else [])]
        run = trainer(tmp_path / str(interval), callbacks, **options)
        run.fit(pretraining(), Batches(*map(batch, range(10))))
        assert logs.seen == [(step, step) for step in range(1, 11)]
        assert (run.callback_metrics["largest"], run.callback_metrics["of_the_epoch"]) == (10, 7)
        seen.append(reads.seen)
    assert seen[0] == seen[1]
    assert [row["tokens"] for row in seen[1]] == [64 * step for step in range(1, 11)]


def test_lightnings_checkpoints_see_the_best_step(tmp_path):
    """A metric of a callback that falls in one step between two logged ones."""

    class Dips(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            self.log("dip", abs(trainer.global_step - 7))

    best = ModelCheckpoint(tmp_path, "{step}", monitor="dip", every_n_train_steps=1)
    stops = EarlyStopping("dip", patience=100)
    run = trainer(tmp_path, [Dips(), stops, best], max_steps=10, log_every_n_steps=4, val_check_interval=5)
    run.fit(pretraining(), Batches(*map(batch, range(10))), validation_loader())
    assert best.best_model_path.endswith("step=7.ckpt")
    assert stops.best_score == 2  # at the validation after step 5


def test_numbers_that_nothing_reads_are_passed_at_logged_steps_only(tmp_path, monkeypatch: pytest.MonkeyPatch):
    passed = []

    def log(self, name, value, *args, **options):
        if name == "tokens":
            passed.append(int(value))

    monkeypatch.setattr(L.LightningModule, "log", log)
    options = {"log_every_n_steps": 4, "max_steps": 10, "val_check_interval": 100}
    trainer(tmp_path, **options).fit(pretraining(), Batches(*map(batch, range(10))))
    assert passed == [64 * step for step in (4, 8, 10)]
