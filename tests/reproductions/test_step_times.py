"""The parts of a step add up to it, on a clock of the host and on events of a device that lags behind."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

from reproductions.step_times import PARTS, StepTimes
from tests.zoo.tiny import Batches, LossLog, ResumableLoader, batch, pretraining, trainer, validation_loader
from zoo.train.callbacks.throughput import Throughput
from zoo.train.metrics_file import read_metrics

NAMES = [f"seconds_{part}" for part in PARTS]


class Clock:
    """A clock that goes on only when something takes time; in seconds."""

    def __init__(self):
        self.now = 0.0

    def take(self, seconds):
        self.now += seconds


class SlowLoader(ResumableLoader):
    """Takes 2 s for a batch."""

    def __init__(self, length, clock):
        super().__init__(length)
        self.clock = clock

    def __iter__(self):
        for given in super().__iter__():
            self.clock.take(2)
            yield given


class Slow(L.Callback):
    """Parts of known length: 3 s forward, 4 s backward, 1 s optimiser, 5 s between steps, and the loader's 2 s."""

    def __init__(self, clock):
        self.clock = clock

    def on_train_start(self, trainer, pl_module):
        pl_module.model.register_forward_hook(lambda *_: self.clock.take(3) if pl_module.training else None)

    def on_before_backward(self, trainer, pl_module, loss):
        self.clock.take(4)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.clock.take(1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.clock.take(5)

    def on_validation_start(self, trainer, pl_module):
        self.clock.take(30)


def rows(folder):
    return [row for row in read_metrics(folder / "metrics.jsonl") if NAMES[0] in row]


def test_each_part_has_its_time_and_validation_has_none(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("reproductions.step_times.time", SimpleNamespace(perf_counter=lambda: clock.now))
    run = trainer(tmp_path, [StepTimes(), Slow(clock)], max_steps=8)
    run.fit(pretraining(), SlowLoader(40, clock), validation_loader())
    found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 8))  # not of the first step
    parts = {"data": 2, "forward": 3, "backward": 4, "optimizer": 1, "other": 5}
    for row in found:  # before the fifth step there is a validation, with what comes before it
        expected = parts | {"other": 0} if row["step"] == 4 else parts
        assert {part: row[f"seconds_{part}"] for part in PARTS} == expected


def test_they_are_means_over_the_steps_between_two_rows(tmp_path, monkeypatch):
    """On a device that is one step behind, whose events say so; a batch takes 1, 2 and 3 seconds, and a gap of 4."""
    clock, behind = [0.0], 6  # marks of one optimiser step, of two batches, that are not reached yet
    marks = []

    class Event:
        def __init__(self, device):
            clock[0] += [4, 1, 2, 3][len(marks) % 4]
            self.at = clock[0]
            self.number = len(marks)
            marks.append(self)

        def query(self):
            return self.number < len(marks) - behind

        def elapsed_time(self, end):
            assert self.query()
            assert end.query()
            return 1000 * (end.at - self.at)

    monkeypatch.setattr("reproductions.step_times.mark", Event)
    run = trainer(tmp_path, [StepTimes()], 9, log_every_n_steps=3, accumulate_grad_batches=2, val_check_interval=100)
    run.fit(pretraining(), ResumableLoader(40), validation_loader())
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [2, 5, 8]
    for row in found:
        assert [row[f"seconds_{part}"] for part in ("forward", "backward", "optimizer")] == [2, 4, 6]
        assert row["seconds_data"] + row["seconds_other"] == pytest.approx(8)
        assert 0 < row["seconds_data"] < 0.1


def test_nothing_else_changes(tmp_path):
    profiler, losses = SimpleProfiler(), []
    for name, callbacks in (("with", [StepTimes(), Throughput()]), ("without", [])):
        log = LossLog()
        L.seed_everything(5, verbose=False)
        run = trainer(tmp_path / name, [*callbacks, log], profiler=profiler)
        run.fit(pretraining(0.2), Batches(*map(batch, range(12))), validation_loader())
        losses.append(log.losses)
        assert run.profiler is profiler
    assert losses[0] == losses[1]
    asked = profiler.recorded_durations["[EpochLoop].train_dataloader_next"]
    assert len(asked) == 24  # in both runs: the profiler has heard of all of it


@pytest.mark.gpu
def test_on_a_gpu_the_parts_are_seconds_of_the_gpu(tmp_path):
    """The forward pass sleeps on the device alone, so the host's clock would see nothing of it."""
    milliseconds = 20

    class Sleep(L.Callback):
        def on_train_start(self, trainer, pl_module):
            cycles = int(milliseconds * 1e-3 * 1.0e9)
            pl_module.model.register_forward_hook(lambda *_: torch.cuda._sleep(cycles))

    run = trainer(
        tmp_path, [StepTimes(), Sleep(), Throughput()], 30, accelerator="gpu", devices=1, val_check_interval=100
    )
    run.fit(pretraining(), ResumableLoader(40), validation_loader())
    found = rows(tmp_path)
    assert len(found) >= 20
    assert found[-1]["seconds_forward"] > 0.4e-3 * milliseconds  # cycles are of a clock of 1 to 2.5 GHz
    assert found[-1]["seconds_forward"] > 2 * found[-1]["seconds_optimizer"]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["peak_memory_gib"] > 0
