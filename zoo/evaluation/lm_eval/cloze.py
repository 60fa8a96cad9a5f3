"""Questions about a document as a sentence to complete, as in arXiv 2402.18668 and 2407.05483.

The data sets come in two forms: `text` ends with the question (FDA, SWDE, SQuAD), or `context` and `question` are apart
(TriviaQA, Natural Questions, DROP).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from zoo.data import Tokenizer

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
