"""Tasks made of tokens: an oracle answers everything, guessing is chance, and sizes that cannot be are refused."""

import random
from collections.abc import Sequence

import pytest
import torch

from kernels import UserError
from reproductions import mad, mqar_variants
from reproductions.mad import Memorization
from tests.commands import Command
from tests.zoo.data.synthetic import oracles
from zoo.data import MQAR, Batch, RecallTask, TokenTasks
from zoo.evaluation.loaded import Scored, TokenScores
from zoo.evaluation.task import Cell, Options, Task
from zoo.evaluation.tasks import TASKS

OTHERS = {task.name: task for task in (*mad.TASKS, *mqar_variants.TASKS)}

# name → vocabulary, and what solves it; that of recall depends on the pairs
NAMES = {
    "mqar": 64,
    "mqar_stacked": 1156,
    "mqar_compositional": 64,
    "mqar_forgetting": 64,
    "mad_recall": 16,
    "mad_fuzzy": 16,
    "mad_noisy": 32,
    "mad_copy": 16,
    "mad_compression": 49,
    "mad_memorization": 64,
}


def oracle_of(name: str, cell: Cell) -> oracles.Oracle:
    if name == "mqar":
        return oracles.recall(cell["pairs"])
    if name == "mqar_compositional":
        return oracles.compositional(cell["pairs"])
    if name == "mqar_forgetting":
        return oracles.forgetting(cell["pairs"], cell["pairs"] // 2)
    if name == "mad_memorization":
        return facts
    return {
        "mqar_stacked": oracles.stacked,
        "mad_recall": oracles.in_context(),
        "mad_fuzzy": oracles.in_context(),
        "mad_noisy": oracles.in_context(16),
        "mad_copy": oracles.copy,
        "mad_compression": oracles.compression,
    }[name]


def facts(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
    """What training samples of the same seed teach."""
    task = Memorization()
    batch = TokenTasks([task], vocab_size).samples(task, 1, "train").batch(range(100))
    learned = dict(zip(batch.tokens[:, ::2].flatten().tolist(), batch.labels[:, 1::2].flatten().tolist(), strict=True))
    return {t + 1: learned[tokens[t]] for t in range(0, len(tokens), 2)}


class Answering:
    """A subject that says what a function of the tokens says."""

    name, tokenizer, context_length = "answering", None, None

    def __init__(self, vocab_size: int, answer: oracles.Oracle) -> None:
        self.vocab_size, self.answer = vocab_size, answer

    def label_scores(self, batch: Batch) -> TokenScores:
        said = torch.full_like(batch.labels, -1)
        for row, tokens in enumerate(batch.tokens.tolist()):
            for t, token in self.answer(tokens, self.vocab_size).items():
                said[row, t] = token
        return TokenScores(torch.zeros(batch.labels.shape), said == batch.labels)

    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        raise NotImplementedError

    def log_likelihoods(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Scored]:
        raise NotImplementedError

    def state_size(self, length: int) -> float:
        return 1.0


def guessing(vocab_size: int) -> Answering:
    """Any token of the vocabulary, at every position."""
    generator = random.Random(0)
    return Answering(vocab_size, lambda tokens, size: {t: generator.randrange(size) for t in range(len(tokens))})


def made(name: str, **options: object) -> Task:
    return (TASKS | OTHERS)[name](Options(**{"samples": 20, **options}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_oracle_answers_everything_and_a_guess_is_chance(name: str):
    task, vocab_size = made(name), NAMES[name]
    guesser = guessing(vocab_size)
    cells = task.cells(guesser)
    assert cells
    for cell in cells:
        (row,) = task.run(Answering(vocab_size, oracle_of(name, cell)), cell)
        assert row == {**row, **cell, "metric": "accuracy", "value": 1.0, "high": 1.0}
        assert 0 < row["low"] < 1
        assert row["count"] >= 20
        (row,) = task.run(guesser, cell)
        deviation = (1 / vocab_size * (1 - 1 / vocab_size) / row["count"]) ** 0.5
        assert abs(row["value"] - 1 / vocab_size) < 4.5 * deviation
        assert row["low"] < 1 / vocab_size + 4 * deviation


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_functions_of_the_seed(name: str):
    def seen(seed: int) -> list[list[int]]:
        actual: list[list[int]] = []
        task = made(name, seed=seed, samples=3)

        def listen(tokens: Sequence[int], vocab_size: int) -> dict[int, int]:
            actual.append(list(tokens))
            return {}

        subject = Answering(NAMES[name], listen)
        task.run(subject, task.cells(subject)[0])
        return actual

    assert seen(0) == seen(0) != seen(1)
    assert len(seen(0)) == 3


def test_samples_are_none_that_were_trained_on():
    task = made("mqar", lengths=(16,), samples=50)
    assert isinstance(task, TASKS["mqar"])
    data = MQAR([RecallTask(16, 4)], 64)
    rows = {
        tuple(row)
        for split in ("train", "validation", "test")
        for row in data.samples(data.tasks[0], 50, split).batch(range(50)).tokens.tolist()
    }
    evaluated = task.samples({"length": 16, "pairs": 4}, 64).batch(range(50))  # type: ignore[attr-defined]
    assert not rows & {tuple(row) for row in evaluated.tokens.tolist()}


def test_lengths_make_sizes():
    subject = guessing(256)
    assert made("mqar", lengths=(32, 64)).cells(subject) == [
        {"length": 32, "pairs": 4},
        {"length": 32, "pairs": 8},
        {"length": 64, "pairs": 4},
        {"length": 64, "pairs": 8},
        {"length": 64, "pairs": 16},
    ]
    assert made("mqar_stacked", lengths=(17,)).cells(subject) == [{"length": 8, "pairs": 4}, {"length": 16, "pairs": 8}]
    compositional = made("mqar_compositional", lengths=(100,)).cells(subject)
    assert compositional == [{"length": 100, "pairs": 4}, {"length": 100, "pairs": 16}]
    assert made("mad_compression", lengths=(32,)).cells(subject) == [{"length": 31}]
    assert made("mad_memorization", lengths=(33,)).cells(subject) == [{"length": 32}]


def test_of_the_default_sizes_those_that_fit_the_vocabulary_are_measured():
    assert [cell["pairs"] for cell in made("mqar").cells(guessing(64))] == [4, 8, 16]
    assert [cell["pairs"] for cell in made("mqar").cells(guessing(1024))] == [4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_cannot_be_are_refused_in_one_sentence(name: str):
    with pytest.raises(UserError, match=rf"lengths: 1 is too short; {name} needs at least \d+ tokens"):
        made(name, lengths=(1,))
    with pytest.raises(UserError, match=rf"{name}: answering has a vocabulary of 3; length \d+.* needs .*at least \d+"):
        made(name).cells(guessing(3))


def test_shortest_lengths_are_possible():
    for name, vocab_size in NAMES.items():
        shortest = (TASKS | OTHERS)[name].shortest  # type: ignore[attr-defined]
        task = made(name, lengths=(shortest,), samples=200)
        (cell, *_) = task.cells(guessing(vocab_size))
        assert task.run(guessing(vocab_size), cell)


@pytest.mark.slow
def test_a_model_that_was_trained_on_recall_is_measured_by_the_command(command: Command, desk):
    fit = ("fit", "--config", "recall/mqar.yaml", "--trainer.max_steps=2", "--data.validation_samples=8")
    command(*fit, "--optim.warmup_steps=1", "--trainer.val_check_interval=2", "--run", "small").ok()
    done = command(
        "evaluate",
        "--checkpoint",
        "runs/small",
        "--tasks=mqar,reproductions.mqar_variants.ForgettingTask",
        "--samples=4",
    ).ok()
    assert "recall of values by their keys" in done.out
    said = command("evaluate", "--checkpoint", "runs/small", "--tasks=mqar", "--lengths=[512]").sentence()
    assert "mqar: small has a vocabulary of 128; length 512, pairs 64 needs an even number, at least 130" in said
