"""Steps that would spoil the model: not taken, counted, and too many of them end the run."""

import copy

import lightning as L
import pytest
import torch

from kernels.errors import UserError
from tests.zoo.tiny import Data, LossLog, pretraining, trainer
from zoo.checkpoints.format import read_checkpoint
from zoo.train.callbacks import loss_guard as guard
from zoo.train.callbacks.loss_guard import Diverged, LossGuard
from zoo.train.metrics_file import read_metrics


class Spoil(L.Callback):
    """Does something to the loss or the gradients in some steps."""

    def __init__(self, steps, what: str, value: float) -> None:
        self.steps, self.what, self.value = steps, what, value

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.now = trainer.global_step + 1 in self.steps

    def on_before_backward(self, trainer, pl_module, loss):
        if self.now and self.what == "loss":
            loss.data.fill_(self.value)

    def on_after_backward(self, trainer, pl_module):
        if self.now and self.what == "gradient":
            pl_module.model.head.weight.grad.mul_(self.value)


class States(L.Callback):
    """Parameters and the state of the optimiser after each step."""

    def __init__(self) -> None:
        self.after: dict[int, tuple] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = pl_module.state_dict(), trainer.optimizers[0].state_dict()["state"]
        self.after[trainer.global_step] = copy.deepcopy(state)


def same(one: tuple, other: tuple) -> bool:
    (weights, moments), (other_weights, other_moments) = one, other
    return all(torch.equal(weights[name], other_weights[name]) for name in weights) and all(
        torch.equal(moments[i][name], other_moments[i][name]) for i in moments for name in moments[i]
    )


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("what", "value"),
    [("loss", float("nan")), ("loss", float("inf")), ("gradient", float("nan")), ("gradient", float("inf"))],
)
def test_a_step_that_is_not_finite_is_not_taken(what, value, fused, tmp_path):
    states = States()
    fitted = trainer(tmp_path, [Spoil({4, 7}, what, value), watch := LossGuard(), states])
    fitted.fit(module := pretraining(fused=fused), Data())
    assert fitted.global_step == 12
    taken = [not same(states.after[step], states.after[step - 1]) for step in range(2, 13)]
    assert taken == [step not in (4, 7) for step in range(2, 13)]
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["skipped_steps"] for row in rows] == [0] * 3 + [1] * 3 + [2] * 6
    assert watch.skipped == 2


@pytest.mark.slow
def test_a_run_without_trouble_is_the_same_with_a_guard(tmp_path):
    with_guard, without = LossLog(), LossLog()
    trainer(tmp_path / "a", [LossGuard(spike=100.0, window=4), with_guard]).fit(pretraining(), Data())
    trainer(tmp_path / "b", [without]).fit(pretraining(), Data())
    assert with_guard.losses == without.losses


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_spike_is_not_taken(what, tmp_path):
    states = States()
    callbacks = [Spoil({4, 5, 10}, what, 1000.0), watch := LossGuard(spike=5.0, window=8), states]
    trainer(tmp_path, callbacks).fit(pretraining(), Data())
    assert not same(states.after[4], states.after[3])  # too early to know
    assert same(states.after[5], states.after[4])  # half of the window is known
    assert same(states.after[10], states.after[9])
    assert watch.skipped == 2


def test_part_of_an_accumulated_step_spoils_all_of_it(tmp_path):
    class SpoilHalf(L.Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            if trainer.global_step == 2 and trainer.fit_loop.batch_idx % 2 == 0:
                loss.data.fill_(float("nan"))

    states = States()
    fitted = trainer(tmp_path, [SpoilHalf(), watch := LossGuard(), states], max_steps=5, accumulate_grad_batches=2)
    fitted.fit(pretraining(), Data())
    assert [same(states.after[n], states.after[n - 1]) for n in (2, 3, 4, 5)] == [False, True, False, False]
    assert watch.skipped == 1


def test_too_many_in_a_row_end_the_run_with_the_last_good_state_saved(tmp_path, capfd):
    states = States()
    bad = {3, *range(5, 40)}
    says = (
        r"3 steps in a row had a loss or gradients that are not finite.*cli.py fit --resume .* --optim.learning_rate="
    )
    with pytest.raises(Diverged, match=says):
        trainer(tmp_path, [Spoil(bad, "gradient", float("nan")), LossGuard(patience=2), states], max_steps=40).fit(
            pretraining(), Data()
        )
    saved = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert saved["global_step"] == 7
    for name, tensor in states.after[4][0].items():
        assert torch.equal(saved["state_dict"][name], tensor)
    assert "step 7 is saved" in capfd.readouterr().err


class Copied:
    """An event of a device that has always come so far."""

    def synchronize(self) -> None:
        pass


def test_what_the_host_hears_late_is_counted_a_step_later(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "_copied_to_host", lambda *scalars: guard.Outcome(torch.stack(scalars), Copied()))
    bad, states = {3, 6, *range(8, 40)}, States()
    late = LossGuard(spike=50.0, window=6, patience=2)
    with pytest.raises(Diverged, match="3 steps in a row"):
        trainer(tmp_path, [Spoil(bad, "gradient", float("nan")), late, states], max_steps=40).fit(pretraining(), Data())
    assert [same(states.after[n], states.after[n - 1]) for n in range(2, 11)] == [n in bad for n in range(2, 11)]
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["skipped_steps"] for row in rows] == [0, 0, 0, 1, 1, 1, 2, 2, 3, 4]
    saved = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert saved["global_step"] == 11
    assert saved["callbacks"]["LossGuard"]["skipped"] == 6  # a checkpoint knows all of them


def test_the_last_step_of_a_run_is_counted_too(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "_copied_to_host", lambda *scalars: guard.Outcome(torch.stack(scalars), Copied()))
    trainer(tmp_path, [Spoil({12}, "gradient", float("nan")), late := LossGuard()]).fit(pretraining(), Data())
    assert late.skipped == 1
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["skipped_steps"] == 1


def test_a_continued_run_counts_on(tmp_path):
    spoil = Spoil({2, 5, 6, 8}, "gradient", float("nan"))
    trainer(tmp_path, [spoil, LossGuard(spike=50.0, patience=3)], max_steps=6).fit(pretraining(), Data())
    run = trainer(tmp_path, [spoil, watch := LossGuard(spike=50.0, patience=3)], max_steps=9)
    run.fit(pretraining(), Data(), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert watch.skipped == 4
    assert len(watch.state_dict()["losses"]) == 5


@pytest.mark.parametrize("wrong", [{"spike": 0.5}, {"window": 1}, {"patience": -1}], ids=str)
def test_wrong_settings(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        LossGuard(**wrong)
