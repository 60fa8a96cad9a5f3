"""Tasks made of tokens: what each of them asks, and that any of their samples can be made at any time."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import UserError
from reproductions.mad import Compression, InContextRecall, Memorization, SelectiveCopy
from reproductions.mqar_variants import CompositionalRecall, ForgettingRecall, StackedRecall
from tests.commands import Command
from tests.zoo.data.synthetic import oracles
from zoo.config import CONFIGS
from zoo.data import Batch, TokenTask, TokenTasks, WordProblem

SOLVABLE: dict[str, tuple[TokenTask, int, oracles.Oracle]] = {
    "stacked": (StackedRecall(16), 1024, oracles.stacked),
    "stacked, two passes": (StackedRecall(8, passes=2), 100, oracles.stacked),
    "compositional": (CompositionalRecall(64, 9), 32, oracles.compositional(9)),
    "compositional among zeros": (CompositionalRecall(random_fillers=False), 32, oracles.compositional(4)),
    "forgetting": (ForgettingRecall(), 32, oracles.forgetting(8, 4)),
    "forgetting all": (ForgettingRecall(64, 4, 4, random_fillers=False), 32, oracles.forgetting(4, 4)),
    "in context": (InContextRecall(), 16, oracles.in_context()),
    "fuzzy": (InContextRecall(pairs=4, motif=3), 16, oracles.in_context()),
    "noisy": (InContextRecall(noise=0.2), 32, oracles.in_context(16)),
    "copy": (SelectiveCopy(), 16, oracles.copy),
    "compression": (Compression(), 49, oracles.compression),
    "parity": (WordProblem(length=100), 2, oracles.word_problem("parity")),
    "three items": (WordProblem("S3"), 6, oracles.word_problem("S3")),
    "five items": (WordProblem("A5"), 60, oracles.word_problem("A5")),
}
TASKS = {**{name: (task, size) for name, (task, size, _) in SOLVABLE.items()}, "facts": (Memorization(), 64)}


def samples(task: TokenTask, vocab_size: int, number: int = 40, **arguments: Any) -> Batch:
    """The first validation samples of a task."""
    data = TokenTasks([task], vocab_size, batch_size=number, validation_samples=number, **arguments)
    (loader,) = data.val_dataloader()
    return next(iter(loader))


@pytest.mark.parametrize("name", SOLVABLE)
def test_an_oracle_that_reads_the_tokens_answers_everything(name: str):
    task, vocab_size, oracle = SOLVABLE[name]
    batch = samples(task, vocab_size)
    assert batch.tokens.shape == batch.labels.shape == (40, task.length)
    assert 0 <= int(batch.tokens.min()) <= int(batch.tokens.max()) < vocab_size
    asked = 0
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        expected = {t: label for t, label in enumerate(labels) if label != -100}
        answers = oracle(tokens, vocab_size)
        assert {t: answers[t] for t in expected} == expected
        asked += len(expected)
    assert asked > 100


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_is_a_function_of_seed_split_and_number(name: str):
    task, vocab_size = TASKS[name]
    data = TokenTasks([task], vocab_size)
    whole = data.samples(task, 100, "train").batch(range(100))
    assert torch.equal(data.samples(task, 9, "train").batch([70, 3]).tokens, whole.tokens[[70, 3]])
    assert torch.equal(data.samples(task, 9, "train").batch([70, 3]).labels, whole.labels[[70, 3]])
    others = (data.samples(task, 100, "validation"), TokenTasks([task], vocab_size, seed=1).samples(task, 100, "train"))
    assert not any(torch.equal(other.batch(range(100)).tokens, whole.tokens) for other in others)
    assert len({tuple(row) for row in whole.tokens.tolist()}) == 100


def test_samples_never_change():
    """Runs of any age are continued by these functions."""
    shapes = (StackedRecall(3), CompositionalRecall(24, 4), ForgettingRecall(12, 2, 1), InContextRecall(12, noise=0.2))
    actual = [TokenTasks([task], 26).samples(task, 1, "train").batch([1000]).tokens[0].tolist() for task in shapes]
    assert actual == FROZEN


FROZEN = [
    [24, 11, 19, 4, 1, 3],
    [6, 14, 24, 6, 13, 19, 1, 14, 20, 1, 13, 16, 6, 14, 6, 6, 13, 2, 1, 13, 10, 1, 14, 0],
    [3, 22, 5, 14, 3, 23, 3, 15, 18, 1, 5, 19],
    [11, 20, 18, 2, 5, 2, 5, 3, 7, 4, 9, 14],
]


def test_neither_key_alone_says_which_value():
    batch = samples(CompositionalRecall(), 32)
    for tokens in batch.tokens[:, :12].tolist():
        for part in (tokens[0::3], tokens[1::3]):
            assert sorted(map(part.count, part)) == [2, 2, 2, 2]
        assert len(set(tokens[2::3])) == 4


def test_a_key_that_is_written_again_has_another_value():
    task = ForgettingRecall()
    for tokens in samples(task, 18).tokens.tolist():
        before = dict(zip(tokens[0:16:2], tokens[1:16:2], strict=True))
        after = dict(zip(tokens[16:24:2], tokens[17:24:2], strict=True))
        assert len(before) == 8
        assert len(after) == 4
        assert all(before[key] != value for key, value in after.items())


def test_a_key_is_answered_only_after_it_came():
    batch = samples(InContextRecall(), 16)
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        for t in range(0, 128, 2):
            assert (labels[t] != -100) == (tokens[t] in tokens[0:t:2])
        assert set(labels[1::2]) == {-100}


def test_noise_has_its_share_and_its_tokens():
    batch = samples(InContextRecall(noise=0.2), 32, 200)
    assert (batch.tokens >= 16).double().mean() == pytest.approx(0.2, abs=0.01)
    assert not (batch.labels >= 16).any()


def test_motifs_have_one_to_three_tokens():
    batch = samples(InContextRecall(pairs=4, motif=3), 16, 200)
    runs = "".join("k" if token < 8 else "v" for token in batch.tokens[:, :100].flatten().tolist())
    for other in "kv":
        assert {len(run) for run in runs.split(other)} >= {1, 2, 3}


def test_facts_are_the_same_in_all_splits_and_lengths_and_others_with_another_seed():
    def facts(data: TokenTasks, split: Any) -> dict[int, int]:
        batch = data.samples(data.tasks[0], 1, split).batch(range(50))
        pairs = set(zip(batch.tokens[:, ::2].flatten().tolist(), batch.labels[:, 1::2].flatten().tolist(), strict=True))
        assert len(dict(pairs)) == len(pairs), "one value a key"
        return dict(pairs)

    train = facts(TokenTasks([Memorization()], 32), "train")
    assert len(train) == 15
    assert train == facts(TokenTasks([Memorization(64)], 32), "test")
    assert train != facts(TokenTasks([Memorization()], 32, seed=1), "train")


def test_several_tasks_have_names_of_their_own():
    data = TokenTasks([SelectiveCopy(16, 2, weight=3.0), InContextRecall(24)], 16)
    assert data.validation_names == ["SelectiveCopy_length_16_copied_2", "InContextRecall_length_24"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StackedRecall(0), "pairs: 0 must be at least 1"),
        (lambda: StackedRecall(passes=0), "passes: 0 must be at least 1"),
        (lambda: CompositionalRecall(23, 4), "length: 23 is too short, 4 pairs need at least 24 tokens"),
        (lambda: CompositionalRecall(pairs=8), "pairs: 8 must be a square number, such as 4, 9 or 16"),
        (lambda: ForgettingRecall(39, 8, 4), "length: 39 is too short, 8 pairs need at least 40 tokens"),
        (lambda: ForgettingRecall(updates=9), "updates: 9 must be from 0 to the number of pairs, 8"),
        (lambda: ForgettingRecall(pairs=0), "pairs: 0 must be at least 1"),
        (lambda: CompositionalRecall(power=0.0), r"power: 0\.0 must be a finite number above 0"),
        (lambda: InContextRecall(11, motif=3), "length: 11 is too short, a key that comes twice needs 12 tokens"),
        (lambda: InContextRecall(noise=1.0), r"noise: 1\.0 must be from 0 to below 1"),
        (lambda: InContextRecall(pairs=0), "pairs: 0 must be at least 1, or null"),
        (lambda: InContextRecall(motif=0), "motif: 0 must be at least 1"),
        (lambda: InContextRecall(noise_tokens=0), "noise_tokens: 0 must be at least 1"),
        (lambda: SelectiveCopy(31, 16), "length: 31 is too short, copying 16 tokens needs at least 32"),
        (lambda: SelectiveCopy(copied=0), "copied: 0 must be at least 1"),
        (lambda: Compression(0), "compressed: 0 must be at least 1"),
        (lambda: Compression(content=1), "content: 1 must be at least 2"),
        (lambda: Memorization(33), "length: 33 must be an even number, at least 2"),
        (lambda: TokenTasks([]), r"data\.tasks is an empty list; give at least one, such as"),
        (lambda: TokenTasks([SelectiveCopy(), SelectiveCopy()]), "lists length_256_copied_16 twice"),
        (lambda: TokenTasks([SelectiveCopy(weight=0)]), r"data\.tasks\[0\]\.weight is 0; it must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], message: str):
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    ("task", "vocab_size", "least"),
    [
        (StackedRecall(), 288, 289),
        (CompositionalRecall(), 11, 12),
        (ForgettingRecall(), 16, 18),
        (ForgettingRecall(), 19, 18),
        (InContextRecall(pairs=4), 8, 10),
        (InContextRecall(noise=0.2), 18, 4),
        (SelectiveCopy(), 3, 4),
        (Compression(), 48, 49),
        (Memorization(), 2, 4),
    ],
)
def test_a_vocabulary_that_is_too_small_is_named(task: TokenTask, vocab_size: int, least: int):
    with pytest.raises(UserError, match=rf"vocab_size is {vocab_size}; data\.tasks\[0\] needs .*at least {least}"):
        TokenTasks([task], vocab_size)


MAD = CONFIGS.parent / "reproductions" / "mad_tasks"
FIT = ("fit", "--config", "recall/mqar.yaml", "--trainer.accelerator=cpu", "--data.validation_samples=20")
SHORT = ("--data.batch_size=4", "--optim.warmup_steps=1", "--trainer.max_steps=2", "--trainer.val_check_interval=2")


@pytest.mark.slow
def test_the_command_line(command: Command, desk):
    command(*FIT, "--config", f"{MAD}/fuzzy.yaml", *SHORT, "--run", "fuzzy").ok()
    row = json.loads((desk / "runs" / "fuzzy" / "results.json").read_text())
    assert list(row["val_accuracy_by_task"]) == ["length_128_pairs_4_motif_3"]
    validated = command("validate", "--checkpoint", "runs/fuzzy")
    assert "accuracy" in validated.out, validated.err
    assert command("fit", "--resume", "fuzzy", "--trainer.max_steps=3").code == 0


def test_mistakes_are_told_in_one_sentence(command: Command):
    for wrong, said in {
        "[{class_path: WordProblm}]": "'WordProblm' is not a known TokenTask; did you mean 'WordProblem'?",
        "[{class_path: WordProblem, init_args: {lenth: 3}}]": "did you mean 'length'?",
        "[{class_path: WordProblem, init_args: {length: 0}}]": "length: 0 must be at least 1",
    }.items():
        assert said in command(*FIT, "--config", "recall/state_tracking.yaml", f"--data.tasks={wrong}").sentence()
