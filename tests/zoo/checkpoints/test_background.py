"""Checkpoints that are written while training goes on: the same files, of their own steps; a failure is told."""

import os
import threading
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from kernels.errors import UserError
from tests.zoo.tiny import At, Data, LossLog, press_ctrl_c, pretraining, trainer
from zoo.checkpoints.background import Background, HostSpace, host_copy
from zoo.checkpoints.format import read_checkpoint
from zoo.train.callbacks.checkpoints import Checkpoints

KEPT = {"every_n_steps": 3, "keep_every_n_steps": 6}
SECONDS = 60  # nothing here takes so long


def saved(folder: Path) -> dict[str, dict]:
    return {path.name: read_checkpoint(path) for path in sorted((folder / "checkpoints").iterdir())}


def fit(folder: Path, callbacks=(), in_background: bool = True, max_steps: int = 12, ckpt_path=None, **options):
    L.seed_everything(3, verbose=False)
    kept = Checkpoints(**{**KEPT, **options}, in_background=in_background)
    run = trainer(folder, [*callbacks, log := LossLog()], max_steps, kept, val_check_interval=4)
    run.fit(pretraining(dropout=0.3), Data(), ckpt_path=ckpt_path)
    return log.losses


class Slow(L.Callback):
    """A disk that has written a checkpoint only after so many more steps, or when training waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int = 2) -> None:
        self.steps, self.real, self.step, self.more = steps, torch.save, 0, threading.Condition()
        self.behind: list[int] = []  # steps done while a checkpoint was being written
        self.waiting = False
        wait = Background.wait

        def waits(background: Background) -> None:
            with self.more:
                self.waiting = True
                self.more.notify()
            try:
                wait(background)
            finally:
                self.waiting = False

        monkeypatch.setattr(torch, "save", self.save)
        monkeypatch.setattr(Background, "wait", waits)

    def save(self, checkpoint, file):
        with self.more:
            step = checkpoint["global_step"]
            assert self.more.wait_for(lambda: self.waiting or self.step >= step + self.steps, SECONDS)
            self.behind.append(self.step - step)
        self.real(checkpoint, file)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with self.more:
            self.step = trainer.global_step
            self.more.notify()


# the parts


def test_jobs_are_done_in_order_until_one_fails():
    jobs, done, gate = Background(), [], threading.Event()
    jobs.wait()  # for nothing

    def fail() -> None:
        raise OSError("no more")

    for job in (lambda: gate.wait(SECONDS), lambda: done.append(1), fail, lambda: done.append(2)):
        jobs.add(job)
    assert not done
    gate.set()
    with pytest.raises(OSError, match="no more"):
        jobs.wait()
    jobs.wait()  # told once
    jobs.add(lambda: done.append(3))
    jobs.wait()
    assert done == [1, 3]


def test_a_copy_shares_nothing_with_the_original_and_what_is_shared_in_it():
    weight = torch.arange(6.0).view(2, 3)
    value = {"a": weight, "tied": weight.detach(), "row": weight[0], "list": [weight.new_zeros(0), {"steps": [1, 2]}]}
    value["state"] = torch.nn.Linear(2, 2).state_dict()
    copied = host_copy(value)
    weight.zero_()
    value["list"][1]["steps"].append(3)
    assert copied["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copied["row"].tolist() == [0, 1, 2]
    assert copied["a"].data_ptr() == copied["tied"].data_ptr()
    assert copied["list"][1] == {"steps": [1, 2]}
    assert copied["state"]._metadata == value["state"]._metadata


# whole runs


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[int, float], Slow]:
    """Two runs, the second one with a disk that takes two steps for a checkpoint."""
    here, there = (tmp_path_factory.mktemp(name) for name in ("here", "there"))
    losses = fit(here, in_background=False)
    with pytest.MonkeyPatch.context() as patch:
        slow = Slow(patch)
        assert fit(there, [slow]) == losses
    return here, there, losses, slow


@pytest.mark.slow
def test_they_are_those_of_their_steps_although_training_went_on(alike):
    here, there, _, slow = alike
    assert max(slow.behind) >= 2
    expected, actual = saved(here), saved(there)
    assert list(actual) == ["best.ckpt", "last.ckpt", "step-00000006.ckpt", "step-00000012.ckpt"]
    for name, checkpoint in actual.items():
        assert checkpoint["global_step"] == expected[name]["global_step"]
        states = [each["optimizer_states"][0]["state"] for each in (checkpoint, expected[name])]
        pairs = [(checkpoint["state_dict"], expected[name]["state_dict"])]
        pairs += [(own, states[1][number]) for number, own in states[0].items()]
        for own, other in pairs:
            assert all(torch.equal(tensor, other[key]) for key, tensor in own.items())
    assert actual["step-00000006.ckpt"]["global_step"] == 6


def test_a_run_continues_from_them_bitwise(alike, tmp_path):
    _, there, losses, _ = alike
    rest = fit(tmp_path, ckpt_path=there / "checkpoints" / "step-00000006.ckpt")
    assert rest == {step: loss for step, loss in losses.items() if step > 6}


@pytest.mark.slow
def test_only_the_newest_are_kept(tmp_path, monkeypatch):
    fit(tmp_path, [Slow(monkeypatch)], keep_every_n_steps=2, keep_last=2)
    assert [name for name in saved(tmp_path) if name.startswith("step")] == ["step-00000010.ckpt", "step-00000012.ckpt"]


@pytest.mark.parametrize(("full", "last"), [(6, 4), (11, 8)], ids=["by the next", "at the end"])
def test_a_full_disk_is_told(full, last, tmp_path, monkeypatch):
    """Training goes on until the next checkpoint, of a validation, and no other name is given to what is not there."""
    real, steps = torch.save, []

    def fails_half_way(checkpoint, file):
        if checkpoint["global_step"] == full:
            file.write(b"half a checkpoint")
            raise OSError(28, os.strerror(28))
        real(checkpoint, file)

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            steps.append(trainer.global_step)

    monkeypatch.setattr(torch, "save", fails_half_way)
    with pytest.raises(UserError, match="cannot be written: No space left on device; the one saved there before is"):
        fit(tmp_path, [Watch()], every_n_steps=12, max_steps=11)
    assert steps[-1] == (8 if full == 6 else 11)
    actual = saved(tmp_path)
    assert actual["last.ckpt"]["global_step"] == last
    assert f"step-{full:08d}.ckpt" not in actual


def test_a_full_disk_and_a_bug_are_both_told(tmp_path, monkeypatch, capfd):
    def full(checkpoint, file):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(RuntimeError, match="a bug"):
        fit(tmp_path, [At(4, RuntimeError("a bug"))])
    assert "cannot be written: No space left on device" in capfd.readouterr().err


@pytest.mark.slow
def test_a_stopped_run_says_what_is_saved_when_it_is(tmp_path, monkeypatch):
    said, last = [], tmp_path / "checkpoints" / "last.ckpt"
    monkeypatch.setattr(
        "zoo.train.callbacks.checkpoints._print", lambda text: said.append((text, read_checkpoint(last)["global_step"]))
    )
    with pytest.raises(SystemExit):
        fit(tmp_path, [Slow(monkeypatch), At(5, press_ctrl_c)])
    assert said[-1][1] == 5
    assert "step 5 is saved" in said[-1][0]


def test_what_writes_its_checkpoints_itself(tmp_path):
    class Own(SingleDeviceStrategy):
        def save_checkpoint(self, checkpoint, filepath, storage_options=None):
            raise AssertionError

    run = trainer(tmp_path, checkpoints=Checkpoints(in_background=True), strategy=Own("cpu"))
    with pytest.raises(UserError, match="in_background is true, but Own writes its checkpoints itself"):
        run.fit(pretraining(), Data())


def test_a_second_copy_of_a_step_takes_weights_from_the_first():
    jobs, weight = Background(), torch.ones(3)

    def checkpoint(loss: float) -> dict:
        return {"global_step": 1, "state_dict": {"weight": weight}, "optimizer_states": [{"m": weight}], "loss": loss}

    first, second = (jobs.copy(checkpoint(loss), 1) for loss in (0.5, 0.25))
    assert second["state_dict"]["weight"] is first["state_dict"]["weight"]
    assert (first["loss"], second["loss"]) == (0.5, 0.25)
    assert list(second) == list(checkpoint(0))
    weight.zero_()
    assert first["state_dict"]["weight"].tolist() == [1, 1, 1]
    assert jobs.copy(checkpoint(0), 2)["state_dict"]["weight"].tolist() == [0, 0, 0]


@pytest.mark.gpu
def test_copies_of_gpu_tensors_reuse_their_memory():
    space = HostSpace()
    values = {"a": torch.randn(1000, 3, device="cuda"), "b": torch.randn(7, device="cuda").bfloat16()}
    values |= {"t": values["a"].T, "step": torch.ones((), device="cuda"), "none": torch.ones(0, device="cuda")}
    first = host_copy(values, space)
    expected = {name: value.cpu() for name, value in values.items()}
    assert all(torch.equal(first[name], value) for name, value in expected.items())
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in first.values())
    space.start()
    second = host_copy({name: value + 1 for name, value in values.items()}, space)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert torch.equal(second["t"], expected["t"] + 1)
