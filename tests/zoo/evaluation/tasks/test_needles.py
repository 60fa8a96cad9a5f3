"""Needles in haystacks: what prompts look like, who answers them, and what is refused."""

import itertools
import re
from pathlib import Path

import pytest

from kernels import UserError
from reproductions.niah import NiahEasy, NiahStandard
from reproductions.state_recall import StateRecall
from tests.zoo.evaluation.subjects import Guesser, NearMiss, Reader
from zoo.data import Tokenizer
from zoo.evaluation.task import Options
from zoo.evaluation.tasks import TASKS as SHIPPED
from zoo.evaluation.tasks.needle_task import NeedleTask

TASKS = {**SHIPPED, "niah_easy": NiahEasy, "niah_standard": NiahStandard, "state_recall": StateRecall}
NAMES = [name for name, task in TASKS.items() if issubclass(task, NeedleTask)]


def task_of(name: str, **options) -> NeedleTask:
    task = TASKS[name](Options(**options))
    assert isinstance(task, NeedleTask)
    return task


def prompts_of(name: str, tokenizer: Tokenizer, **options) -> list[tuple[dict, str, str]]:
    """Cell, prompt and value of all samples."""
    task = task_of(name, **options)
    cells = task.cells(Reader(tokenizer))
    samples = [(cell, task.sample(tokenizer, cell, i)) for cell in cells for i in range(task.samples)]
    return [(cell, tokenizer.decode(ids), value) for cell, (ids, value) in samples]


def test_these_are_needle_tasks():
    assert {
        *("s_niah_1", "s_niah_2", "s_niah_3", "m_niah_1", "m_niah_2", "passkey"),
        *("niah_easy", "niah_standard", "state_recall"),
    } <= set(NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_reader_is_right_and_a_guesser_is_not(name: str, tokenizer: Tokenizer):
    for subject, expected in ((Reader(tokenizer), 1.0), (Guesser(tokenizer), 0.0)):
        task = task_of(name, lengths=(400, 700), samples=4, depths=(0, 0.3, 1))
        rows = [row for cell in task.cells(subject) for row in task.run(subject, cell)]
        assert {row["value"] for row in rows if row["metric"] == "accuracy"} == {expected}
        assert {(row["length"], row["depth"]) for row in rows} == set(itertools.product((400, 700), (0, 0.3, 1)))
        assert {row["count"] for row in rows} == {4}
        assert all(row["low"] < expected + 1e-9 and expected - 1e-9 < row["high"] for row in rows)
        assert {len(prompt) for prompt in subject.prompts} == {400, 700}
        assert len(subject.prompts) == 2 * 3 * 4


@pytest.mark.slow
@pytest.mark.parametrize("character", [0, -1])
def test_a_value_with_one_wrong_digit_is_wrong(character: int, tokenizer: Tokenizer):
    for name in ("s_niah_1", "s_niah_3", "passkey"):
        task = task_of(name, lengths=(400,), samples=2)
        subject = NearMiss(tokenizer, character)
        assert [row["value"] for cell in task.cells(subject) for row in task.run(subject, cell)] == [0.0]


@pytest.mark.slow
def test_without_depths_a_needle_may_be_anywhere(tokenizers: dict[str, Tokenizer]):
    """One of forty depths, the first and the last sentence included, all about equally often."""
    task, actual = task_of("passkey"), []
    tokenizer = tokenizers["small"]
    for number in range(400):
        ids, value = task.sample(tokenizer, {"length": 400}, number)
        haystack = tokenizer.decode(ids).removeprefix(task.wording.head).rpartition("\n")[0]
        before, _, after = haystack.partition(f"The pass key is {value}.")
        actual.append(len(before) / (len(before) + len(after.partition("is the pass key.")[2])))
    assert min(actual) == 0
    assert max(actual) == 1
    assert sum(actual) / len(actual) == pytest.approx(0.5, abs=0.06)  # four standard errors


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_prompts_have_exactly_the_length(name: str, tokenizer: Tokenizer):
    subject = Reader(tokenizer)
    task = task_of(name, lengths=tuple(range(350, 380)), samples=1, depths=(0.5,))
    for cell in task.cells(subject):
        task.run(subject, cell)
    assert [len(prompt) for prompt in subject.prompts] == list(range(350, 380))
    for prompt in subject.prompts:
        assert (prompt[0] == tokenizer.bos_id) == (tokenizer.bos_id is not None)
        body = prompt[0 if tokenizer.bos_id is None else 1 :]
        assert tokenizer.encode(tokenizer.decode(body)) == body, "they are the encoding of their text"


@pytest.mark.slow
def test_a_long_prompt_is_exact_too(tokenizer: Tokenizer):
    for name in ("s_niah_1", "s_niah_2", "m_niah_2"):
        ids, _ = task_of(name).sample(tokenizer, {"length": 65_536}, 0)
        assert len(ids) == 65_536


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_answer_occurs_outside_its_needle(name: str, tokenizer: Tokenizer):
    for _, prompt, value in prompts_of(name, tokenizer, lengths=(400, 900), samples=10):
        assert prompt.casefold().count(value) == (2 if name == "passkey" else 1)
        assert len(re.findall(rf"is:? {value}", prompt)) == 1
        assert "\n" in prompt
        assert value not in prompt.rpartition("\n")[2], "the question does not tell"


def test_an_answer_that_the_users_text_knows_is_not_in_the_haystack(tmp_path: Path, tokenizer: Tokenizer):
    """Sentences that mention a needle are left out."""
    (_, _, value), *_ = prompts_of("s_niah_2", tokenizer, lengths=(500,), samples=1)
    told = "".join(f"It is told that {value} is the answer to question {i}. Nobody knows. " for i in range(50))
    (tmp_path / "told.txt").write_text(told)
    ((_, prompt, repeated),) = prompts_of(
        "s_niah_2", tokenizer, lengths=(500,), samples=1, haystack=str(tmp_path / "told.txt")
    )
    assert value == repeated
    assert prompt.count(value) == 1
    assert prompt.count("Nobody knows. ") > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["s_niah_1", "s_niah_2", "m_niah_1", "passkey", "niah_standard"])
def test_the_needle_is_at_its_depth(name: str, tokenizer: Tokenizer):
    depths = (0, 0.25, 0.5, 0.75, 1)
    task = task_of(name, lengths=(3000,), samples=2, depths=depths)
    for depth, i in itertools.product(depths, range(2)):
        ids, value = task.sample(tokenizer, {"length": 3000, "depth": depth}, i)
        haystack = tokenizer.decode(ids).removeprefix("<eos>").removeprefix(task.wording.head).rpartition("\n")[0]
        stated = rf"(One of|The special|The pass key)[^.]*{value}\.( Remember it\. {value} is the pass key\.)?"
        needle = re.search(stated, haystack)
        assert needle
        before, after = (len(tokenizer.encode(part.strip())) for part in re.split(re.escape(needle.group()), haystack))
        assert before / (before + after) == pytest.approx(depth, abs=0.05)
        if name != "m_niah_1":  # whose other needles may come first or last
            assert (before == 0, after == 0) == (depth == 0, depth == 1)


@pytest.mark.slow
def test_samples_are_a_function_of_seed_task_cell_and_number(tokenizer: Tokenizer):
    options = {"lengths": (600, 800), "samples": 3}
    every = prompts_of("s_niah_2", tokenizer, **options)
    assert every == prompts_of("s_niah_2", tokenizer, **options)
    assert every[3:] == prompts_of("s_niah_2", tokenizer, lengths=(800,), samples=3)
    assert len({prompt for _, prompt, _ in every}) == 6
    others = prompts_of("s_niah_2", tokenizer, seed=1, **options)
    assert not {value for *_, value in every} & {value for *_, value in others}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_has_its_needle_and_depth_at_every_length(name: str, tokenizers: dict[str, Tokenizer]):
    """And text that begins alike: lengths differ only in how much of it there is."""
    task, tokenizer = task_of(name), tokenizers["small"]
    depths = []
    for number in range(6):
        places, values, openings = [], set(), set()
        for length in (1500, 2200, 3000):
            ids, value = task.sample(tokenizer, {"length": length}, number)
            haystack = tokenizer.decode(ids).removeprefix("<eos>").removeprefix(task.wording.head).rpartition("\n")[0]
            place = haystack.index(value)
            places.append(place / (len(haystack) - len(value)))
            values.add(value)
            openings.add(haystack[:40])
        assert max(places) - min(places) < 0.06
        assert (len(values), len(openings)) == (1, 1)
        depths.append(places[0])
    assert max(depths) - min(depths) > 0.2, "samples differ"


def test_the_words_are_rulers(tokenizer: Tokenizer):
    ((_, prompt, value),) = prompts_of("s_niah_3", tokenizer, lengths=(500,), samples=1)
    key = re.findall(r"for ([a-z]+-[a-z]+) is: ", prompt)[0]
    assert prompt.startswith(
        "A special magic uuid is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the uuid afterwards.\n"
    ) or prompt.startswith("<eos>A special")
    assert f" One of the special magic uuids for {key} is: {value}." in prompt
    assert prompt.endswith(
        f"\nWhat is the special magic uuid for {key} mentioned in the provided text? "
        f"The special magic uuid for {key} mentioned in the provided text is"
    )


@pytest.mark.slow
def test_haystacks_are_what_they_are_called(tokenizer: Tokenizer, stories: Path):
    options = {"lengths": (900,), "samples": 1}
    texts = {name: prompts_of(name, tokenizer, **options)[0][1] for name in NAMES}
    for name, prompt in texts.items():
        assert (prompt.count("The grass is green.") > 8) == (name in ("s_niah_1", "passkey"))
    assert texts["m_niah_1"].count("One of the special magic numbers for") == 4
    assert texts["m_niah_2"].count("One of the special magic numbers for") > 15
    assert len(set(re.findall(r"for (\S+) is: ", texts["m_niah_2"]))) > 15
    assert "What is the special magic number for" in texts["niah_easy"].rpartition("\n")[0]
    assert "What is" not in texts["niah_standard"].rpartition("\n")[0]
    assert prompts_of("s_niah_2", tokenizer, **options, haystack=str(stories))[0][1].count("nobody came") > 15


@pytest.mark.slow
def test_lengths_that_do_not_fit_are_left_out_of_the_default_only(tokenizers: dict[str, Tokenizer]):
    lengths = {name: [cell["length"] for cell in task_of(name).cells(Reader(tokenizers["small"]))] for name in NAMES}
    assert lengths["passkey"] == [256, 512, 1024, 2048]
    assert lengths["state_recall"] == list(range(512, 4097, 512))
    message = "s_niah_3: a length of 100 tokens is too small .* the smallest possible length is (\\d+)\\.$"
    with pytest.raises(UserError, match=message) as caught:
        task_of("s_niah_3", lengths=(512, 100)).cells(Reader(tokenizers["small"]))
    smallest = int(re.findall(r"\d+", str(caught.value))[-1])
    subject = Reader(tokenizers["small"])
    task = task_of("s_niah_3", lengths=(smallest,))
    for cell in task.cells(subject):
        task.run(subject, cell)
    assert max(map(len, subject.prompts)) == smallest
    with pytest.raises(UserError, match=f"the smallest possible length is {smallest}"):
        task_of("s_niah_3", lengths=(smallest - 1,)).cells(subject)


def test_what_is_refused_before_anything_runs(tmp_path: Path, tokenizer: Tokenizer):
    with pytest.raises(UserError, match="passkey: reader was saved without a tokenizer"):
        task_of("passkey").cells(Reader(None))
    with pytest.raises(UserError, match="m_niah_2: a length of 10000000 tokens needs more needles than there are"):
        task_of("m_niah_2", lengths=(10_000_000,)).cells(Reader(tokenizer))
    with pytest.raises(UserError, match=r"haystack\.path: .*nowhere\.txt does not exist"):
        task_of("s_niah_2", haystack=str(tmp_path / "nowhere.txt")).cells(Reader(tokenizer))
    (tmp_path / "code.txt").write_text("    x = 1\n    y = 2\n")
    with pytest.raises(UserError, match=r"haystack\.path=.*code\.txt has no sentences"):
        task_of("s_niah_2", haystack=str(tmp_path / "code.txt")).cells(Reader(tokenizer))
