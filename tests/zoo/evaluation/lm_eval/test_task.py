"""lm-eval's tasks from a folder of files: what they ask, how they are scored, and what is missing."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zoo
from kernels import UserError
from tests.zoo.evaluation.lm_eval.conftest import Answering
from zoo.data import Tokenizer
from zoo.evaluation.lm_eval.paper_tasks import PAPER_TASKS, RULER
from zoo.evaluation.lm_eval.task import lm_eval_task
from zoo.evaluation.task import Options, Row

Write = Callable[..., Path]
PIQA = {"goal": "Open a jar", "sol1": "Turn the lid", "sol2": "Smash it", "label": 0}


def run(name: str, subject: Answering, folder: Path | str | None, **options: object) -> list[Row]:
    task = lm_eval_task(name)(Options(data=folder and str(folder), **options))
    return [row for cell in task.cells(subject) for row in task.run(subject, cell)]


@pytest.mark.slow
def test_longbench_is_scored_without_a_download(data: Write) -> None:
    folder = data("longbench_hotpotqa.jsonl", {"context": "c", "question": "q", "input": "q", "answers": ["green cat"]})
    says = Answering(lambda prompt: " Green cat.\n")
    rows = {row["metric"]: row["value"] for row in run("longbench_hotpotqa", says, folder)}
    assert rows["score"] == pytest.approx(1)


def test_babilong_has_documents_for_each_length(data: Write) -> None:
    doc = {"input": "Mary is in the garden.", "question": "Where is Mary?", "target": "garden"}
    folder = data("babilong_qa1/0k.jsonl", doc)
    data("babilong_qa1/2k.jsonl", {**doc, "input": "Mary is far away."}, doc)
    asked = Answering(lambda prompt: "In the garden" if "in the garden" in prompt else "Far away")
    rows = run("babilong_qa1", asked, folder) + run("babilong_qa1", asked, folder, lengths=(2048,))
    assert [(row["length"], row["value"], row["count"]) for row in rows] == [(0, 1, 1), (2048, 0.5, 2)]
    with pytest.raises(UserError, match="lengths: BABILong has no 100; its lengths are 0, 1024, 2048"):
        run("babilong_qa1", asked, folder, lengths=(100,))


def test_examples_come_from_another_split(data: Write) -> None:
    def doc(number: int) -> dict:
        choices = {"text": list("vwxyz"), "label": list("ABCDE")}
        return {"question": f"question {number}?", "choices": choices, "answerKey": "A"}

    folder = data("commonsense_qa/validation.jsonl", doc(100), doc(101))
    data("commonsense_qa/train.jsonl", *map(doc, range(20)))
    asked = [Answering(), Answering(), Answering()]
    for subject, seed in zip(asked, (0, 0, 1), strict=True):
        run("commonsense_qa@8", subject, folder, seed=seed)
    prompts = [[bytes(context).decode() for context, _ in subject.requests] for subject in asked]
    assert {len(set(re.findall(r"question (\d+)\?", prompt))) for prompt in prompts[0]} == {9}
    assert prompts[0] == prompts[1] != prompts[2]
    run("commonsense_qa", asked[0], folder)
    assert bytes(asked[0].requests[-1][0]).decode().count("question") == 1


def test_samples_and_parquet(data: Write, capsys: pytest.CaptureFixture[str]) -> None:
    import datasets

    folder = data("other.jsonl")
    datasets.Dataset.from_list([PIQA] * 7).to_parquet(folder / "piqa.parquet")
    capsys.readouterr()
    assert {row["count"] for row in run("piqa", Answering(), folder, samples=3)} == {3}
    assert {row["count"] for row in run("piqa", Answering(), folder)} == {7}
    assert "%|" not in capsys.readouterr().err  # lm-eval's progress bar


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("piqa", "data: there is no {0}/piqa.jsonl (nor .parquet, .json, nor a folder piqa with a file for each split)"
         "; it must hold baber/piqa"),
        ("fda", "data: there is no {0}/fda.jsonl (nor .parquet, .json, nor a folder fda with a file for each split)"
         "; it must hold hazyresearch/based-fda (default)"),
        ("babilong_qa1", "data: there is no {0}/babilong_qa1/0k.jsonl "),
        ("arc_easy", "data: there is no {0}/arc_easy/test.jsonl (nor .parquet, .json); it must hold the split test of "
         "allenai/ai2_arc (ARC-Easy)"),
        ("hellaswag", "data: the documents of lm_eval/hellaswag in {0} lack what the data set has (KeyError"),
        ("boolq", "data: {0}/boolq.jsonl cannot be read as documents: Expecting value"),
        ("social_iqa", "data: {0}/social_iqa.jsonl holds no documents"),
        ("openbookqa@2", "data: lm_eval/openbookqa with 2 examples takes them from another split, so it needs a folder "
         "{0}/openbookqa with a file for each split, and not one file"),
        ("piqa@two", "tasks: in lm_eval/piqa@two, 'two' should be the number of examples in each prompt"),
    ],
)  # fmt: skip
def test_what_is_missing_is_told_in_one_sentence(name: str, message: str, data: Write) -> None:
    folder = data("hellaswag.jsonl", PIQA)
    data("arc_easy/train.jsonl", {"question": "q"})
    data("social_iqa.jsonl")
    (folder / "boolq.jsonl").write_text("no JSON\n")
    choices = {"text": ["a", "b"], "label": ["A", "B"]}
    data("openbookqa.jsonl", {"question_stem": "s", "choices": choices, "answerKey": "A"})
    with pytest.raises(UserError, match=re.escape(message.format(folder))) as error:
        lm_eval_task(name)(Options(data=str(folder))).cells(Answering())
    assert "\n" not in str(error.value)


def test_without_a_folder_the_data_set_is_named() -> None:
    message = r"data: lm_eval/wic needs a folder with wic\.jsonl, which holds aps/super_glue \(wic\), validation.*=hub"
    with pytest.raises(UserError, match=message):
        lm_eval_task("wic")(Options()).cells(Answering())


def test_a_model_without_a_tokenizer_is_refused(data: Write) -> None:
    subject = Answering()
    subject.tokenizer = None
    with pytest.raises(UserError, match="lm_eval/piqa: needs a tokenizer"):
        lm_eval_task("piqa")(Options(data=str(data("piqa.jsonl", PIQA)))).cells(subject)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPER_TASKS)
def test_the_table_says_where_tasks_and_data_are(name: str) -> None:
    """That the task is in this folder, with this data set."""
    from zoo.evaluation.lm_eval import building

    listed = PAPER_TASKS[name]
    config = building.manager(name).task_index[name].cfg
    if source := config.get("dataset_path"):
        assert listed.source.startswith(source)
        if (part := config.get("dataset_name")) and source != "RMT-team/babilong-1k-samples":
            assert f"({part})" in listed.source
    for key in ("test_split", "validation_split"):
        if (split := config.get(key)) and name not in RULER:  # its prompts are generated
            assert split in listed.source
            break


def test_without_lm_eval_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.evaluator", None)
    with pytest.raises(UserError, match=r"lm_eval/piqa: needs lm-eval; pip install 'token-mixer-zoo\[eval\]'"):
        lm_eval_task("piqa")(Options())


@pytest.mark.slow
def test_evaluate_over_a_folder(finished: Path, desk: Path, data: Write) -> None:
    """A cell on record is measured again only if its file has changed."""
    counts = []
    for documents in (4, 4, 2):
        folder = data("piqa.jsonl", *[PIQA] * documents)
        checkpoint = finished / "runs" / "done"
        rows = zoo.evaluate(checkpoint, "lm_eval/piqa", data=str(folder), samples=3, device="cpu", verbose=False)
        assert [(row["model"], row["task"], row["metric"]) for row in rows] == [
            ("done", "lm_eval/piqa", metric) for metric in ("acc", "acc_norm")
        ]
        assert rows[0]["shots"] == 0
        assert {"lm_eval", "version"} <= rows[0].keys()
        counts.append((rows[0]["count"], len((desk / "evaluations/done/rows.jsonl").read_text().splitlines())))
    assert counts == [(3, 1), (3, 1), (2, 2)]


@pytest.mark.parametrize(
    "folders",
    [
        ("arc", "hellaswag"),
        pytest.param((), marks=pytest.mark.nightly),  # reads lm-eval's whole index
    ],
)
def test_groups_tags_and_unknown_tasks(folders: tuple[str, ...], data: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.evaluation.lm_eval import building

    if folders:
        paths = [building.THEIRS / name for name in folders]
        monkeypatch.setattr(building, "_everything", lambda: building.TaskManager(None, paths, include_defaults=False))
    question = {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A"}
    folder = data("arc_easy.jsonl", question)
    data("arc_challenge.jsonl", question)
    rows = run("ai2_arc", Answering(), folder)
    assert {row["subtask"] for row in rows} == {"arc_easy", "arc_challenge"}
    with pytest.raises(UserError, match="tasks: lm-eval has no task 'hellaswig'; did you mean 'hellaswag'"):
        run("hellaswig", Answering(), folder)


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """RULER, when it is imported, sorts all pairs of its adjectives and nouns: 20 million."""
    wonderwords = pytest.importorskip("wonderwords")
    init = wonderwords.RandomWord.__init__

    def short(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._categories = {name: words[:100] for name, words in self._categories.items()}

    monkeypatch.setattr(wonderwords.RandomWord, "__init__", short)


@pytest.mark.slow
@pytest.mark.usefixtures("few_words")
def test_ruler_generates_its_prompts(tokenizer: Tokenizer) -> None:
    def oracle(prompt: str) -> str:
        return re.findall(r"is: (\d{7})\.", prompt)[0]

    for answer, value in ((oracle, 1), (lambda prompt: "1234567", 0)):
        subject = Answering(answer)
        subject.tokenizer = tokenizer
        rows = run("niah_single_1", subject, None, lengths=(512, 1024), samples=5)
        assert [(row["length"], row["metric"], row["value"], row["count"]) for row in rows] == [
            (512, "accuracy", value, 5),
            (1024, "accuracy", value, 5),
        ]
        lengths = [len(tokenizer.encode(prompt)) for prompt in subject.prompts]
        assert max(lengths[:5]) <= 512 < min(lengths[5:]) <= max(lengths[5:]) <= 1024


@pytest.mark.slow
@pytest.mark.usefixtures("few_words")
def test_needles_in_essays_of_a_folder_are_those_of_lm_eval(
    tokenizer: Tokenizer, data: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    from lm_eval.tasks.ruler import niah_utils, prepare_niah

    from zoo.evaluation.lm_eval.building import ESSAY_NEEDLES, _needles_in, isolate_rng, random, tokenizer_folder

    essays = datasets.Dataset.from_dict({"text": ["One sentence. Another one!  "] * 40})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: essays)
    monkeypatch.setattr(prepare_niah, "sent_tokenize", lambda text: text.split(". "))
    assert {name for name, task in RULER.items() if task.source} == ESSAY_NEEDLES.keys()
    with tokenizer_folder(tokenizer) as folder:
        metadata = {"max_seq_lengths": [1024], "tokenizer": folder}
        for name in ESSAY_NEEDLES:
            documents = []
            for source in (getattr(niah_utils, name), lambda name=name, **of: _needles_in(essays, name, of)):
                with isolate_rng():
                    random.seed(0)
                    documents.append(source(**metadata)["test"][:3])
            assert documents[0] == documents[1]
    prepare_niah.get_haystack.cache_clear()
