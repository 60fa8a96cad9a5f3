"""Recall from documents, with the question as a sentence to complete (arXiv 2402.18668): tasks of `evaluate`.

    python cli.py evaluate --checkpoint=runs/gdn --tasks=reproductions.cloze.SquadCloze --data=FOLDER --lengths=[2048]

`…Twice` gives the prompt twice, as in Just Read Twice (arXiv 2407.05483), whose code also starts with
the question. With a length, the document is cut around the first occurrence of the answer, as in the authors' code.

The data sets come in two forms: `text` ends with the question (FDA, SWDE, SQuAD), or `context` and `question` are apart
(TriviaQA, Natural Questions, DROP).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zoo.data import Tokenizer
from zoo.evaluation.lm_eval.task import LmEval
from zoo.evaluation.loaded import LoadedModel
from zoo.evaluation.task import Cell

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

NEW_TOKENS = 48  # of an answer
_MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")  # where TriviaQA joined paragraphs, documents and titles

Document = Mapping[str, Any]


def parts(doc: Document) -> tuple[str, str]:
    """A document and the question about it; the prompt is the one after the other."""
    if "text" not in doc:
        question = doc["question"].strip()
        context = _MARKS.sub("", doc["context"]).strip().removesuffix(question)
        return context.strip().strip(".") + ". ", question
    text = doc["text"].strip()
    context = (doc.get("context") or "").strip()
    if context and text.startswith(context):
        at = len(context)
    else:
        at = max(text.lower().rfind(str(doc.get("key") or "\n").lower()), 0)
    return text[:at], text[at:]


def prompt(doc: Document) -> str:
    """The document, then the beginning of a sentence that the answer completes."""
    return "".join(parts(doc)).strip()


def twice(doc: Document) -> str:
    """The prompt two times (Just Read Twice), so that the question is known when the document is read."""
    return f"{prompt(doc)}\n{prompt(doc)}"


def answers(doc: Document) -> list[str]:
    """All answers that count."""
    return [answer.strip() for answer in ([doc["value"]] if "value" in doc else doc["answers"])]


def target(doc: Document) -> str:
    """The first answer, if there is one."""
    return next(iter(answers(doc)), "")


def contains(doc: Document, results: Sequence[str]) -> dict[str, float]:
    """The metric `contains`: 1 if any answer occurs in the completion, ignoring case, else 0."""
    return {"contains": float(any(answer.lower() in results[0].lower() for answer in answers(doc)))}


def shortened(doc: Document, tokenizer: Tokenizer, length: int, readings: int = 1) -> dict[str, Any]:
    """A document cut so that prompt and answer fit into `length` tokens.

    As in the authors' code, what is kept surrounds the first answer in the document; without one it is the beginning.

    Args:
        doc: As in the data set.
        tokenizer: Counts.
        length: Tokens of `readings` prompts, which each have the document and the question, and of the answer.
        readings: How often the prompt is given.

    Returns:
        The fields of `doc`, with the document cut; only the question if the document does not fit.
    """
    document, question = parts(doc)
    tokens = tokenizer.encode(document)
    # the tokens at the seams between the parts may differ a little from those of the whole
    room = max(0, (length - NEW_TOKENS) // readings - len(tokenizer.encode(question)) - 4)
    if len(tokens) <= room:
        return dict(doc)
    places = [at for answer in answers(doc) if (at := document.lower().find(answer.lower())) >= 0]
    middle = len(tokenizer.encode(document[: min(places)])) if places else 0
    start = max(0, min(middle - room // 2, len(tokens) - room))
    passage = tokenizer.decode(tokens[start : start + room])
    if "text" in doc:
        return {**doc, "text": f"{passage.strip()} {question}", "context": ""}
    return {**doc, "context": passage}


class Cloze(LmEval):
    """One task of `cloze/`, or of lm-eval, whose documents are cut around the answer if there is a length."""

    folder: ClassVar[Path | None] = Path(__file__).with_suffix("")
    readings: ClassVar[int] = 1  # how often the prompt is given

    def build(self, subject: LoadedModel, cell: Cell) -> "ConfigurableTask":
        """Return lm-eval's task of a cell, with documents of its length."""
        task = super().build(subject, cell)
        if (length := cell.get("length")) is not None:
            docs = task.dataset["validation"]
            cut = [shortened(doc, subject.tokenizer, length, self.readings) for doc in docs]
            task.dataset["validation"] = type(docs).from_list(cut)
        return task


def _tasks(
    name: str, measures: str, source: str, *, file: str | None = None, folder: Path | None = Cloze.folder
) -> tuple[type[Cloze], type[Cloze]]:
    """The task that gives its prompt once, and the one that gives it twice."""
    file = file or name
    attributes = {
        "source": f"{source}, validation",
        "file": file,
        "needs": f"data: {file}.jsonl ({source}, validation)",
    }
    once = {"name": name, "tasks": name, "measures": measures, "folder": folder}
    twice = {"name": f"{name}_twice", "tasks": f"{name}_twice", "measures": f"{measures}, prompt given twice"}
    return type("Cloze", (Cloze,), attributes | once), type("Cloze", (Cloze,), attributes | twice | {"readings": 2})


Fda, FdaTwice = _tasks("fda", "values in reports of the FDA", "hazyresearch/based-fda (default)", folder=None)
Swde, SwdeTwice = _tasks("swde", "values in web pages", "hazyresearch/based-swde-v2 (default)", folder=None)
SquadCloze, SquadClozeTwice = _tasks(
    "squad_cloze", "SQuAD in cloze form", "hazyresearch/based-squad (default)", file="squad_completion"
)
TriviaQaCloze, TriviaQaClozeTwice = _tasks("triviaqa_cloze", "TriviaQA in cloze form", "hazyresearch/based_triviaqa")
NqCloze, NqClozeTwice = _tasks("nq_cloze", "Natural Questions in cloze form", "hazyresearch/based_nq_2048")
DropCloze, DropClozeTwice = _tasks("drop_cloze", "DROP in cloze form", "hazyresearch/based_drop")
