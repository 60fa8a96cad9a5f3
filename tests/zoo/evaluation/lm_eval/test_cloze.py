"""Recall from documents as a sentence to complete: what is asked, how it is scored, and where documents are cut."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import UserError
from reproductions.cloze import Cloze
from tests.zoo.evaluation.lm_eval.conftest import Answering
from zoo.data import Tokenizer
from zoo.evaluation.task import Options, Row
from zoo.evaluation.tasks import tasks_of

Write = Callable[..., Path]
FILLER = "The file is long and says little of use. " * 20
REPORT = {"text": f"{FILLER}Size: Forty-Two mm. {FILLER}Size:", "key": "Size", "value": "forty-two"}
SQUAD = {
    "context": f"{FILLER}It measures forty-two. {FILLER}",
    "question": "How large is it?",
    "text": f"{FILLER}It measures forty-two. {FILLER} It measures",
    "value": "forty-two",
}
APART = {
    "context": f"[PAR] {FILLER}It measures forty-two. {FILLER}",
    "question": "It measures",
    "answers": ["42", "Forty-Two"],
}
DOCUMENTS = {"Fda": ("fda", REPORT), "Swde": ("swde", REPORT), "SquadCloze": ("squad_completion", SQUAD)}
DOCUMENTS |= {f"{name}Cloze": (f"{name.lower()}_cloze", APART) for name in ("TriviaQa", "Nq", "Drop")}


def task_of(name: str, folder: Path | None, **options: object) -> Cloze:
    (task,) = tasks_of([f"reproductions.cloze.{name}"], Options(data=folder and str(folder), **options))
    assert isinstance(task, Cloze)
    return task


def run(name: str, subject: Answering, folder: Path, **options: object) -> list[Row]:
    task = task_of(name, folder, **options)
    return [row for cell in task.cells(subject) for row in task.run(subject, cell)]


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("twice", [False, True])
def test_cloze_questions(name: str, twice: bool, data: Write) -> None:
    file, document = DOCUMENTS[name]
    folder = data(f"{file}.jsonl", document)
    reads, guesses = Answering(lambda prompt: " FORTY-TWO or so\nforty"), Answering(lambda prompt: " 41\nforty-two")
    for subject, value in ((reads, 1), (guesses, 0)):
        (row,) = run(f"{name}{'Twice' * twice}", subject, folder)
        assert (row["metric"], row["value"], row["count"]) == ("contains", value, 1)
    (prompt,) = reads.prompts
    assert prompt.lower().count("forty-two") == prompt.count(FILLER.strip()) / 2 == 1 + twice
    assert prompt.endswith(("Size:", "It measures"))
    assert "[PAR]" not in prompt
    if twice:
        half = len(prompt) // 2
        assert prompt == f"{prompt[:half]}\n{prompt[:half]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_cut_around_the_answer(name: str, data: Write, tokenizer: Tokenizer) -> None:
    file, document = DOCUMENTS[name]
    folder = data(f"{file}.jsonl", document)
    for variant in (name, f"{name}Twice"):
        subject = Answering(lambda prompt: "forty-two")
        subject.tokenizer = tokenizer
        (row,) = run(variant, subject, folder, lengths=(300,))
        assert row["length"] == 300
        (prompt,) = subject.prompts
        assert 200 < len(tokenizer.encode(prompt)) <= 300 - 48
        assert prompt.lower().count("forty-two") == 1 + variant.endswith("Twice")
        assert prompt.endswith(("Size:", "It measures"))


def test_missing_data_is_named(data: Write) -> None:
    folder = data("other.jsonl")
    with pytest.raises(UserError, match=re.escape(f"data: there is no {folder}/nq_cloze.jsonl ")):
        task_of("NqClozeTwice", folder).cells(Answering())
    with pytest.raises(
        UserError, match=r"data: nq_cloze needs a folder with nq_cloze\.jsonl, which holds hazyresearch/"
    ):
        task_of("NqCloze", None).cells(Answering())


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("twice", [False, True])
def test_a_task_names_the_data_set_of_its_config(name: str, twice: bool) -> None:
    from zoo.evaluation.lm_eval import building

    task = task_of(f"{name}{'Twice' * twice}", None)
    config = building.manager(task.tasks, folder=task.folder).task_index[task.tasks].cfg
    if task.folder is None:  # lm-eval's classes name their data sets in Python
        return
    assert task.source.startswith(config["dataset_path"])
    assert f"({config['dataset_name']})" in task.source if "dataset_name" in config else "(" not in task.source
