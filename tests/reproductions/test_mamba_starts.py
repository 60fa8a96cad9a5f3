"""Initial values of Mamba2 and Mamba-3 in sweeps, and word problems whose sequences become longer."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kernels import UserError
from mixers import Mamba2, Mamba3, Site
from reproductions.growing_words import GrowingWordProblem
from reproductions.mamba_starts import LargeSteps, UnscaledSteps
from zoo.config import from_config
from zoo.config.overlays import load_items
from zoo.data.batch import NO_LOSS
from zoo.data.synthetic.task import TokenSamples
from zoo.experiments.commands import read_sweep


def test_decays_start_as_they_say():
    log_decay, dt = Mamba2(Site(256, 4), decay=UnscaledSteps).decay(torch.zeros(8))
    torch.testing.assert_close(dt, torch.full((8,), math.log1p(math.e)))
    torch.testing.assert_close(log_decay / -dt, torch.arange(1.0, 9))
    dt = F.softplus(Mamba3(Site(1024, 4), head_dim=8, decay=LargeSteps).decay.dt_bias)
    assert (dt >= 0.1).all()
    assert (dt <= 1.001).all()
    assert dt.log().mean().item() == pytest.approx(math.log(0.1) / 2, abs=0.25)


def test_the_words_grow():
    task = GrowingWordProblem(length=20, longest=[5, 12], samples=1000)
    samples = TokenSamples(task, 0, 2, 0, "train")
    batches = [samples.batch(range(start, start + 1000)) for start in (0, 1000, 2000)]
    for batch, longest in zip(batches, (5, 12, 12), strict=True):
        labelled = batch.labels != NO_LOSS
        assert set(labelled.sum(1).tolist()) == set(range(3, longest + 1))
        products = batch.tokens.cumsum(1) % 2
        assert (batch.labels == products)[labelled].all()
        assert (labelled.int().diff(dim=1) <= 0).all()  # the first tokens have labels
    part = samples.batch([1500])
    assert torch.equal(part.labels[0], batches[1].labels[500])
    for wrong, message in (
        ({"longest": [5, 21]}, "longest: .* to length, 20"),
        ({"longest": [2]}, "from shortest, 3"),
        ({"longest": []}, "longest"),
        ({"longest": [5], "samples": 0}, "samples: 0 must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            GrowingWordProblem(**{"length": 20} | wrong)


@pytest.mark.slow
def test_the_sweep_over_curricula_builds():
    runs = read_sweep(load_items(["reproductions/sweeps/mamba3_parity.yaml"])).runs()
    assert len(runs) == 7 * 3 * 4
    configs = {run.cell: run.parsed for run in runs if run.parsed}
    for config in configs.values():
        config.model.vocab_size = 2
    sizes = np.array([from_config(config, device="meta").num_parameters() for config in configs.values()])
    assert sizes.max() < 1.03 * sizes.min()
