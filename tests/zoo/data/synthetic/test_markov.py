"""The made-up Markov chain: what it is, and that a sample is a function of its number."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from kernels.errors import UserError
from tests.commands import Command
from tests.zoo.data.contract import some
from zoo.data import MarkovChain
from zoo.data.order import random_bits
from zoo.data.synthetic import markov

SMALL = {"vocab_size": 16, "sequence_length": 24, "batch_size": 4}


def test_each_token_has_so_many_successors_equally_often():
    batch = MarkovChain(vocab_size=10, sequence_length=20_000).train.batch([0, 1])
    counts = np.zeros((10, 10))
    np.add.at(counts, (batch.tokens.flatten().numpy(), batch.labels.flatten().numpy()), 1)
    assert ((counts > 0).sum(1) == 4).all()
    assert ((counts > 0).sum(0) == 4).all()
    expected = counts.sum() / 40
    assert np.abs(counts[counts > 0] - expected).max() < 5 * expected**0.5
    chances = counts / counts.sum()
    entropy = -(chances[counts > 0] * np.log((chances / chances.sum(1, keepdims=True))[counts > 0])).sum()
    assert entropy == pytest.approx(math.log(4), abs=1e-3)
    assert MarkovChain().bigram_loss() == pytest.approx(math.log(4))


def test_nothing_but_the_token_before_counts():
    batch = MarkovChain(vocab_size=10, successors=2, sequence_length=20_000).train.batch([0])
    tokens, labels = batch.tokens[0].numpy(), batch.labels[0].numpy()
    assert (tokens[1:] == labels[:-1]).all()
    first, second = tokens[1:] * 10 + tokens[:-1], labels[1:]
    shares = [np.bincount(second[first == pair], minlength=10).max() / (first == pair).sum() for pair in set(first)]
    assert max(shares) < 0.6  # of its two successors, whichever token was there two before


def test_samples_never_change():
    """Runs of any age are continued, and compared, by this function."""
    batch = MarkovChain(vocab_size=16, sequence_length=8).train.batch([0, 1000])
    assert batch.tokens.tolist() == FROZEN


FROZEN = [[2, 0, 14, 4, 14, 11, 6, 4], [12, 0, 5, 1, 15, 14, 11, 1]]


def test_splits_and_seeds_differ():
    long = {**SMALL, "sequence_length": 300}  # shows every pair that there is
    data, other = MarkovChain(**long), MarkovChain(**long, seed=1)
    batches = [next(iter(loader)) for loader in (data.val_dataloader(), data.test_dataloader(), other.val_dataloader())]
    batches += some(data, 1)
    assert len({tuple(row) for batch in batches for row in batch.tokens.tolist()}) == 4 * 4
    pairs = [set(zip(b.tokens.flatten().tolist(), b.labels.flatten().tolist(), strict=True)) for b in batches]
    assert pairs[0] == pairs[1] == pairs[3] != pairs[2]  # one chain, but for another seed
    assert sum(len(batch.tokens) for batch in data.val_dataloader()) == 64


def test_a_checkpoint_from_before_a_setting_existed_is_resumed():
    data = MarkovChain(**SMALL)
    before = {name: value for name, value in data.state_dict().items() if name != "successors"}
    assert before != data.state_dict()
    data.load_state_dict({**before, "position": 8})
    assert data.state_dict()["position"] == 8


def test_long_sequences_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch):
    samples, sizes = MarkovChain(vocab_size=32_000, sequence_length=2**18).train, []
    monkeypatch.setattr(markov, "random_bits", lambda *inputs: sizes.append(inputs[1]) or random_bits(*inputs))
    assert samples.batch([3]).tokens.shape == (1, 2**18)
    assert sizes == [2**18 + 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"successors": 5, "vocab_size": 4}, "data.successors is 5; data.vocab_size has only 4 tokens"),
        ({"successors": 0}, "data.successors is 0; it must be at least 1"),
        ({"sequence_length": 0}, "data.sequence_length is 0; it must be at least 1"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, message):
    with pytest.raises(UserError, match=message):
        MarkovChain(**arguments)


@pytest.mark.slow
def test_a_model_learns_it(command: Command, desk: Path):
    sizes = ("--model.num_layers=1", "--model.hidden_size=32", "--model.num_heads=1", "--model.vocab_size=null")
    data = ("--data=MarkovChain", "--data.vocab_size=16", "--data.sequence_length=32", "--data.batch_size=8")
    trainer = ("--trainer.max_steps=100", "--trainer.accelerator=cpu", "--trainer.limit_val_batches=2")
    optim = ("--optim.learning_rate=1e-2", "--optim.warmup_steps=5")
    command("fit", "--config", "gated_deltanet.yaml", *sizes, *data, *trainer, *optim, "--run", "chain").ok()
    actual = json.loads((desk / "runs/chain/results.json").read_text())
    assert math.log(4) - 0.02 < actual["val_loss"] < 1.7 < math.log(16)
    assert actual["bigram_loss"] == pytest.approx(math.log(4))
