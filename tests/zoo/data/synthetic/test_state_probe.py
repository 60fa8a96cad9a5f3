"""The one-minute probe: does a larger state recall more? One layer, and a pair is one token: there is no shift to find.

64 keys and values, 16 pairs, keys of 8 beside values of 16, the delta rule without decay, 1,100 steps at 1e-2. Accuracy
of seeds 0, 1 and 2: .70 .70 .63 with E = 1, 1.0 1.0 .99 with four subheads.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixers import Expanded, Features, GatedDeltaNet, Site
from reproductions.mqar_variants import StackedRecall
from zoo.data import TokenTasks

KEYS = VALUES = 64
WIDTH = 64
TASK = StackedRecall(16)
VOCABULARY = 1 + KEYS + VALUES + KEYS * VALUES


class Probe(nn.Module):
    """One mixer; the embedding of a pair is the sum of those of its key and its value, as 4,096 would take too long."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        features = {"qk": Features(activation="silu", norm="l2"), "v": Features(activation="silu")}
        inner = partial(GatedDeltaNet, head_dim=8, value_dim=16, decay=None, **features)
        self.keys, self.values = nn.Embedding(KEYS, WIDTH), nn.Embedding(VALUES + 1, WIDTH)  # the last: none
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.mixer = Expanded(mixer=inner, factor=factor)(Site(WIDTH, num_heads=1))
        self.head = nn.Linear(WIDTH, VALUES, bias=False)
        for table in (self.keys, self.values):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        pair = tokens - (1 + KEYS + VALUES)  # negative: a question, token 1 + key
        key = torch.where(pair < 0, tokens - 1, pair // VALUES)
        value = torch.where(pair < 0, VALUES, pair % VALUES)
        x = self.keys(key) + self.values(value)
        return self.head(self.after(x + self.mixer(self.before(x))[0]))


def accuracy_after_training(factor: int, seed: int, steps: int, batch: int) -> float:
    torch.manual_seed(seed)
    data, probe = TokenTasks([TASK], VOCABULARY, seed=seed), Probe(factor)
    optimiser = torch.optim.AdamW(probe.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1, (step + 1) / 50) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    samples = data.samples(TASK, 1, "train")
    for step in range(steps):
        tokens, labels, _ = samples.batch(range(step * batch, (step + 1) * batch))
        asked = labels >= 0
        loss = F.cross_entropy(probe(tokens)[asked], labels[asked] - 1 - KEYS)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(probe.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    tokens, labels, _ = data.samples(TASK, 1, "validation").batch(range(200))
    asked = labels >= 0
    with torch.no_grad():
        return (probe(tokens)[asked].argmax(-1) == labels[asked] - 1 - KEYS).double().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "batch"), [(300, 32), pytest.param(1100, 64, marks=pytest.mark.nightly)])
def test_a_state_four_times_larger_recalls_more(steps: int, batch: int):
    small, large = (accuracy_after_training(factor, seed=0, steps=steps, batch=batch) for factor in (1, 4))
    assert 0.1 < small < 0.9, "the pairs are more than the small state holds, and it has learned"
    assert large > small + 0.1
