"""SCROLLS with lm-eval's prompts, scored without a download: the task `reproductions.scrolls.Scrolls` of `evaluate`.

lm-eval's own classes need a scoring script from the Hub, and a module that transformers 5 no longer has. F1 is SQuAD's,
on words; ROUGE is that of `rouge_score`, with stemming; both take the best reference, and are means in percent.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from rouge_score.rouge_scorer import RougeScorer
from torchmetrics.functional.text import squad

from zoo.evaluation.lm_eval.task import LmEval

Document = Mapping[str, Any]
ROUGE = ("rouge1", "rouge2", "rougeL")
VERDICTS = ["Not mentioned", "Entailment", "Contradiction"]


class Scrolls(LmEval):
    """The seven tasks, zero-shot; `scrolls/` has their configs."""

    name = tasks = "scrolls"
    measures = "SCROLLS: summaries and questions about long texts, by ROUGE, F1 and accuracy"
    needs = "data: scrolls_qasper.jsonl and six more (tau/scrolls, validation)"
    folder = Path(__file__).with_suffix("")


def summaries(rows: datasets.Dataset) -> datasets.Dataset:
    """Documents with all their `outputs`: a document is a row for each of them in the data."""
    return _joined(rows, dict)


def questions(rows: datasets.Dataset) -> datasets.Dataset:
    """Documents with `question` and `text` apart: in the data the question comes first, before an empty line."""
    return _joined(rows, _question_first)


def quality(rows: datasets.Dataset) -> datasets.Dataset:
    """Questions whose four choices, (A) to (D), stand before the text."""
    return _joined(rows, _choices_first)


def contracts(rows: datasets.Dataset) -> datasets.Dataset:
    """Hypotheses about a contract."""
    return _joined(
        rows, lambda row: {**_question_first(row), "choices": VERDICTS, "gold": VERDICTS.index(row["output"])}
    )


def rouge(doc: Document, results: Sequence[str]) -> dict[str, float]:
    """ROUGE-1, 2 and L of a summary."""
    scores = RougeScorer(ROUGE, use_stemmer=True).score_multi(doc["outputs"], results[0])
    return {kind: 100 * scores[kind].fmeasure for kind in ROUGE}


def f1(doc: Document, results: Sequence[str]) -> dict[str, float]:
    """F1 of an answer's words."""
    answers = {"answer_start": [0] * len(doc["outputs"]), "text": list(doc["outputs"])}
    scores = squad({"prediction_text": results[0], "id": "0"}, {"answers": answers, "id": "0"})
    return {"f1": float(scores["f1"])}


class Qasper(ConfigurableTask):
    """Questions about a paper: yes or no by the likelier word, all others by generation."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config={key: value for key, value in config.items() if key != "class"})

    def construct_requests(self, doc: Document, ctx: str, **arguments: Any) -> list[Instance]:
        """One request to generate, or two log-likelihoods."""
        about = {"doc": doc, "metadata": arguments["metadata"]}
        if _yes_or_no(doc):
            return [
                Instance(request_type="loglikelihood", arguments=(ctx, word), idx=number, **about)
                for number, word in enumerate((" yes", " no"))
            ]
        return [Instance(request_type="generate_until", arguments=(ctx, self.config.generation_kwargs), idx=0, **about)]

    def process_results(self, doc: Document, results: Sequence[Any]) -> dict[str, float]:
        """F1 of the answer; an empty one says that there is none."""
        if _yes_or_no(doc):
            return f1(doc, ["yes" if results[0] > results[1] else "no"])
        return f1(doc, [results[0] if results[0].strip() else "Unanswerable"])


def _yes_or_no(doc: Document) -> bool:
    return {output.lower().strip(" .") for output in doc["outputs"]} <= {"yes", "no"}


def _joined(rows: datasets.Dataset, parse: Callable[[Document], Document]) -> datasets.Dataset:
    documents: dict[str, dict[str, Any]] = {}
    for row in rows:
        document = documents.setdefault(row["id"], {**parse(row), "outputs": []})
        document["outputs"].append(row["output"])
    return datasets.Dataset.from_list(list(documents.values()))


def _question_first(row: Document) -> dict[str, Any]:
    question, _, text = row["input"].partition("\n\n")
    return {**row, "question": question, "text": text}


def _choices_first(row: Document) -> dict[str, Any]:
    asked = _question_first(row)
    head, _, last = asked["text"].partition("(D)")
    last, _, text = last.partition("\n\n")
    choices = [" ".join(choice.split()) for choice in (*re.split(r"\([A-C]\)", head)[1:], last)]
    return {**asked, "text": text.strip(), "choices": choices, "gold": choices.index(" ".join(row["output"].split()))}
