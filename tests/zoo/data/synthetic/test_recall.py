import json
import re
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from kernels.errors import UserError
from tests.commands import Command
from tests.zoo.data.contract import some
from zoo.data import MQAR, RecallTask
from zoo.data.synthetic.recall import Recall, shares

TWO = [RecallTask(32, 4, 3.0), RecallTask(24, 2)]


@pytest.mark.parametrize(("length", "pairs", "vocab_size"), [(32, 4, 64), (16, 4, 10), (65, 16, 64), (7, 1, 4)])
@pytest.mark.parametrize("fillers", [True, False])
def test_each_question_is_labelled_with_the_value_that_followed_its_key(length, pairs, vocab_size, fillers):
    samples = Recall(RecallTask(length, pairs), 50, vocab_size, fillers, 0.01, "a")
    batch = samples.batch(range(50))
    assert batch.tokens.shape == batch.labels.shape == (50, length)
    assert batch.cu_seqlens is None
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(1 <= key < vocab_size // 2 for key in keys)
        assert all(vocab_size // 2 <= value < vocab_size for value in values)
        asked = [t for t, label in enumerate(labels) if label != -100]
        assert sorted(tokens[t] for t in asked) == sorted(keys)  # each once
        assert all(t >= 2 * pairs and t % 2 == 0 for t in asked)
        assert all(labels[t] == values[keys.index(tokens[t])] for t in asked)
        others = [token for t, token in enumerate(tokens) if t >= 2 * pairs and t not in asked]
        assert all(0 <= token < vocab_size for token in others)
        assert fillers or set(others) <= {0}


def test_keys_values_and_fillers_are_uniform():
    batch = Recall(RecallTask(32, 4), 1, 16, True, 0.01, "a").batch(range(4000))
    parts = {"keys": (batch.tokens[:, 0:8:2], range(1, 8)), "values": (batch.tokens[:, 1:8:2], range(8, 16))}
    parts["fillers"] = (batch.tokens[:, 9::2], range(16))
    for name, (tokens, allowed) in parts.items():
        counts = np.bincount(tokens.flatten().numpy(), minlength=16)
        expected = tokens.numel() / len(allowed)
        assert counts.sum() == counts[list(allowed)].sum(), name
        assert np.abs(counts[list(allowed)] - expected).max() < 5 * expected**0.5, name


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_gaps_are_drawn_without_replacement_by_their_weight(power: float):
    """Against NumPy's own draws, one sample after the other: how often each gap is the first key's, and is taken."""
    number, space, pairs = 4000, 12, 4
    batch = Recall(RecallTask(32, pairs), 1, 64, False, power, "a").batch(range(number))
    weights = power * np.arange(1, space + 1) ** (power - 1)
    generator = np.random.default_rng(0)
    draws = [generator.choice(space, pairs, replace=False, p=weights / weights.sum()) for _ in range(number)]
    first = np.bincount([gaps[0] for gaps in draws], minlength=space) / number
    taken = np.bincount(np.concatenate(draws), minlength=space) / number
    is_first = (batch.tokens[:, 8::2] == batch.tokens[:, :1]).numpy().mean(0)
    is_taken = (batch.labels[:, 8::2] != -100).numpy().mean(0)
    assert np.abs(is_first - first).max() < 0.04
    assert np.abs(is_taken - taken).max() < 0.04
    assert power == 1 or is_taken[0] > 2 * is_taken[-1]  # short gaps are favoured


def test_samples_never_change():
    """Runs of any age are continued, and compared, by this function."""
    batch = Recall(RecallTask(12, 2), 1, 16, True, 0.01, "0 train").batch([0, 1000])
    assert batch.tokens.tolist() == FROZEN


FROZEN = [[4, 8, 5, 10, 4, 15, 2, 0, 5, 13, 14, 9], [4, 10, 3, 9, 4, 11, 3, 8, 10, 3, 7, 4]]


def test_tasks_come_by_their_weight():
    lengths = Counter(batch.tokens.shape[1] for batch in some(MQAR(tasks=TWO, batch_size=1), 1000))
    assert lengths == {32: 750, 24: 250}
    mixed = [batch.tokens.shape[1] for batch in some(MQAR(tasks=TWO, batch_size=1), 100)]
    assert 15 < mixed.count(24) < 35
    assert shares(10, [3, 1, 1e-9]) == [7, 2, 1]
    assert shares(9, [5, 1, 1, 1, 1]) == [5, 1, 1, 1, 1]


@pytest.mark.parametrize("tasks", [TWO, TWO[:1]], ids=["two", "one"])
def test_a_fixed_set_is_shown_once_a_pass(tasks: list[RecallTask]):
    data = MQAR(tasks=tasks, batch_size=4, train_samples=48)
    assert len(data.train_dataloader()) == 12
    rows = [[tuple(row) for row in batch.tokens.tolist()] for batch in some(data, 36)]
    passes = [list(chain.from_iterable(rows[n : n + 12])) for n in (0, 12, 24)]
    assert [len(set(each)) for each in passes] == [48, 48, 48]
    assert set(passes[0]) == set(passes[1]) == set(passes[2])
    assert passes[0] != passes[1] != passes[2]
    assert Counter(map(len, passes[0])) == ({32: 36, 24: 12} if len(tasks) > 1 else {32: 48})


def test_validation_tasks_have_names():
    data = MQAR(validation_tasks=[RecallTask(64, 4), RecallTask(64, 8), RecallTask(128, 16)], validation_samples=40)
    assert data.validation_names == ["pairs_4", "pairs_8", "pairs_16"]
    assert data.sequence_length == 128
    assert [sum(len(b.tokens) for b in loader) for loader in data.val_dataloader()] == [40, 40, 40]
    assert MQAR(tasks=[RecallTask(64, 8), RecallTask(128, 8)]).validation_names == [
        "length_64_pairs_8",
        "length_128_pairs_8",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks": [RecallTask(15, 4)]}, r"data\.tasks\[0\]\.length is 15; 4 pairs need at least 16 tokens"),
        (
            {"validation_tasks": [RecallTask(), RecallTask(64, 9)], "vocab_size": 18},
            r"data\.validation_tasks\[1\]\.pairs is 9; data\.vocab_size 18 has only 8 keys",
        ),
        ({"tasks": [RecallTask(64, 0)]}, r"data\.tasks\[0\]\.pairs is 0; it must be at least 1"),
        ({"tasks": [RecallTask(64, 8, 0.0)]}, r"data\.tasks\[0\]\.weight is 0\.0; it must be above 0"),
        ({"tasks": []}, r"data\.tasks is an empty list"),
        ({"tasks": [RecallTask(), RecallTask()]}, r"data\.tasks lists length 64 with 8 pairs twice"),
        ({"vocab_size": 511}, r"data\.vocab_size is 511; it must be an even number, at least 4"),
        ({"power": 0.0}, r"data\.power is 0\.0; it must be above 0"),
        ({"train_samples": 31}, r"data\.train_samples is 31; it must be at least 32"),
        ({"validation_samples": 0}, r"data\.validation_samples is 0; it must be at least 1"),
    ],
)
def test_argument_errors(arguments: dict, message: str):
    with pytest.raises(UserError, match=message):
        MQAR(**arguments)


FIT = ("fit", "--config", "recall/mqar.yaml", "--trainer.accelerator=cpu", "--data.validation_samples=100")


@pytest.mark.slow
def test_the_command_line(command: Command, desk):
    tasks = "--data.tasks=[{length: 16, pairs: 2}, {length: 32, pairs: 4, weight: 2}]"
    small = (
        tasks,
        "--data.vocab_size=10",
        "--data.batch_size=8",
        "--optim.warmup_steps=2",
        "--optim.schedule=constant",
    )
    small += ("--trainer.val_check_interval=4", "--trainer.log_every_n_steps=1")
    done = command(*FIT, *small, "--trainer.max_steps=8", "--run", "whole").ok()
    assert "accuracy, pairs 4" in done.out
    run = desk / "runs" / "whole"
    row = json.loads((run / "results.json").read_text())
    assert (row["status"], row["steps"], row["bigram_loss"], row["context_length"]) == ("complete", 8, None, 32)
    assert list(row["val_accuracy_by_task"]) == ["pairs_2", "pairs_4"]
    two, four = row["val_accuracy_by_task"].values()
    assert 0 < row["val_accuracy"] == pytest.approx((2 * two + 4 * four) / 6)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if "val_accuracy_pairs_2" in m] == [3, 7]
    assert not (run / "tokenizer.json").exists()

    validated = command("validate", "--checkpoint", "runs/whole").ok()
    shown = re.search(r"accuracy, pairs 4\W+([\d.]+)", validated.out)
    assert shown
    assert float(shown[1]) == pytest.approx(100 * four, abs=0.06)
    tested = command("test", "--checkpoint", "runs/whole")
    assert "accuracy, pairs 4" in tested.out, tested.err
    command("predict", "--checkpoint", "runs/whole", "--output", "losses.jsonl").ok()
    rows = [json.loads(line) for line in (desk / "losses.jsonl").read_text().splitlines()]
    asked = Counter((r["loader"], sum(loss is not None for loss in r["losses"])) for r in rows)
    assert asked[0, 2] == asked[1, 4] == 100  # the last batch is filled to nothing, on one device
    generated = command("generate", "--checkpoint", "runs/whole")
    assert (generated.code, "saved without a tokenizer" in generated.err) == (2, True)


def test_wrong_arguments_are_told_in_one_sentence(command: Command):
    for wrong, said in {
        "--data.tsks=3": "data.tsks: unknown key; did you mean 'tasks'?",
        "--data.tasks=[{length: 16, pair: 2}]": "data.tasks.pair: unknown key; did you mean 'pairs'?",
        "--data.tasks=[{length: x}]": "is not a whole number",
    }.items():
        assert said in command(*FIT, wrong).sentence()


@pytest.mark.slow
def test_a_mixer_learns_to_recall(command: Command, desk):
    """And training stops when it can."""
    quick = ("--model.stack.mixer.mixer=DeltaNet", "--trainer.callbacks.stopping_threshold=0.95")
    command(*FIT, *quick, "--run", "run", "--trainer.max_steps=1000").ok()
    row = json.loads((desk / "runs" / "run" / "results.json").read_text())
    assert row["val_accuracy"] >= 0.95
    assert (row["status"], row["steps"] < 1000) == ("complete", True)
    assert row["val_loss_mixers_zeroed"] > 2 * row["val_loss"]
