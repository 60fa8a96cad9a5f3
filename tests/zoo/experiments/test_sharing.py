"""`sweep --jobs=auto`: the number of runs at a time that makes the sweep shortest, from timed steps."""

import os

import pytest
import torch

from zoo.experiments import Run
from zoo.experiments.sharing import Trial, best_jobs, chosen, measure

TINY = ("gla.yaml", "model.vocab_size=32", "model.hidden_size=16", "model.num_heads=1", "model.num_layers=1")
DATA = ("data.batch_size=2", "data.sequence_length=16")


@pytest.mark.parametrize(
    ("trial", "runs", "steps", "gpus", "jobs"),
    [
        (Trial(10, {1: 100.0, 2: 200.0, 4: 300.0, 8: 290.0}), 20, 10**4, 1, 4),
        (Trial(10, {1: 100.0, 2: 100.0, 4: 100.0, 8: 100.0}), 20, 10**6, 1, 1),  # they take turns, and nothing is won
        (Trial(10, {1: 100.0, 2: 101.0}), 20, 10**6, 1, 1),  # a gain within the noise
        (Trial(30, {1: 100.0, 2: 100.0, 4: 100.0}), 20, 100, 1, 4),  # start-up takes most of the time
        (Trial(10, {1: 100.0, 2: 190.0, 4: 200.0}), 2, 10**4, 1, 2),  # there are no more runs
        (Trial(10, {1: 100.0, 2: 190.0}), 8, 10**4, 4, 8),  # two on each of four GPUs
    ],
)
def test_the_shortest_sweep(trial: Trial, runs: int, steps: int, gpus: int, jobs: int):
    assert chosen(trial, runs, steps, gpus)[0] == jobs


def test_what_was_measured_and_chosen_is_one_line():
    _, line = chosen(Trial(10, {1: 123.4, 2: 200.0}), 20, 36000, 1)
    assert line == "jobs: 2 runs at a time on each GPU, about 62 min in all (steps/s measured: 123 with 1, 200 with 2)"


def test_without_gpus_there_is_a_run_for_each_core(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert best_jobs([Run("a", TINY)] * 20) == (4, "jobs: 4 at a time, one for each CPU core")
    assert best_jobs([Run("a", TINY)] * 3)[0] == 3


def test_runs_without_a_number_of_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    endless = Run("a", (*TINY, "trainer.max_steps=-1"))
    jobs, why = best_jobs([endless._replace(parsed=endless.read())])
    assert jobs == 2
    assert "not all runs have sequences and a number of steps" in why


@pytest.mark.nightly
def test_steps_of_several_processes():
    """Those that cannot start are left out; the first one must."""
    wrong = Run("b", (*TINY, "data.batch_size=-1"))
    trial = measure([Run("a", (*TINY, *DATA)), wrong], torch.device("cpu"), [1, 2])
    assert trial.ready > 0
    assert trial.speeds.keys() == {1}
    assert trial.speeds[1] > 0
    with pytest.raises(RuntimeError, match=r"data\.batch_size is -1"):
        measure([wrong], torch.device("cpu"), [1])
