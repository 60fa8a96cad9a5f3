"""SCROLLS from a folder of files: what is asked, and how it is scored."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import UserError
from tests.zoo.evaluation.lm_eval.conftest import Answering
from zoo.evaluation.task import Options, Row
from zoo.evaluation.tasks import tasks_of

Write = Callable[..., Path]


def run(name: str, subject: Answering, folder: Path) -> list[Row]:
    (task,) = tasks_of(["reproductions.scrolls.Scrolls"], Options(data=str(folder)))
    return task.run(subject, {"subtask": f"scrolls_{name}"})


@pytest.mark.slow
def test_scrolls_is_scored_without_a_download(data: Write) -> None:
    question = {"id": "1", "pid": "1_0", "input": "Who is it?\n\nSome text."}
    folder = data("scrolls_narrativeqa.jsonl", {**question, "output": "the cat"}, {**question, "output": "a green cat"})
    says = Answering(lambda prompt: " Green cat.\n")
    (row,) = run("narrativeqa", says, folder)
    assert (row["metric"], row["value"], row["count"]) == ("f1", pytest.approx(100), 1)
    assert says.prompts == ["Some text.\n\nQuestion: Who is it?\nAnswer:"]

    data("scrolls_qasper.jsonl", {**question, "output": "No"}, {**question, "id": "2", "output": "Unanswerable"})
    nothing = Answering(lambda prompt: "\n")
    (row,) = run("qasper", nothing, folder)  # " no" has fewer bytes than " yes", and is likelier here
    assert (row["value"], len(nothing.requests), len(nothing.prompts)) == (100, 2, 1)

    data("scrolls_govreport.jsonl", {"id": "1", "pid": "1_0", "input": "Report", "output": "a b c d"})
    rows = {row["metric"]: row["value"] for row in run("govreport", Answering(lambda p: "a b d"), folder)}
    assert rows == {"rouge1": pytest.approx(600 / 7), "rouge2": pytest.approx(40), "rougeL": pytest.approx(600 / 7)}

    choices = "Who?\n\n (A) it was one\n (B) two\n (C) three \n (D) four\n\nSome text"
    data("scrolls_quality.jsonl", {"id": "1", "pid": "1_0", "input": choices, "output": "two"})
    rows = {row["metric"]: row["value"] for row in run("quality", says, folder)}
    assert rows == {"acc": 1, "acc_norm": 0}  # shortest answers are likeliest here, and the second a byte more each


@pytest.mark.slow
def test_its_tasks_are_seven_and_need_their_files(data: Write) -> None:
    from reproductions.scrolls import Scrolls
    from zoo.evaluation.lm_eval.building import names

    assert [name.removeprefix("scrolls_") for name in names("scrolls", Scrolls.folder)] == [
        *("contractnli", "govreport", "narrativeqa", "qasper", "qmsum", "quality", "summscreenfd")
    ]
    folder = data("scrolls_contractnli.jsonl", {"id": "1", "input": "h\n\nt", "output": "Entailment"})
    missing = f"data: there is no {folder}/scrolls_govreport.jsonl "
    with pytest.raises(UserError, match=re.escape(missing)):
        Scrolls(Options(data=str(folder))).cells(Answering())
