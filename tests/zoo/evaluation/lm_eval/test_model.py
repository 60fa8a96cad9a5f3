"""lm-eval's requests are answered with the numbers of the model."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kernels import UserError
from tests.zoo.evaluation.lm_eval.conftest import TEXTS, Answering
from tests.zoo.evaluation.subjects import direct
from zoo.evaluation.lm_eval.task import lm_eval_task
from zoo.evaluation.loaded import LoadedModel
from zoo.evaluation.task import Options

LONG = "".join(TEXTS) * 10  # some 300 tokens; the model's training context is 32
PIQA = [
    {"goal": "Open a jar", "sol1": "Turn the lid", "sol2": "Smash it on the floor", "label": 0},
    {"goal": LONG + "Open a jar", "sol1": "Smash it", "sol2": "Turn it", "label": 1},
    {"goal": LONG[50:], "sol1": "the cat", "sol2": "hello to the jar", "label": 0},
]


@pytest.fixture
def subject_lm(oracle: Callable[[str], ModuleType]) -> Any:
    return oracle("zoo.evaluation.lm_eval.model").SubjectLM


def instances(kind: str, *arguments: tuple) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=args, idx=0) for args in arguments]


def test_log_likelihoods_are_the_models(subject: LoadedModel, subject_lm: Any) -> None:
    encode, eos = subject.tokenizer.encode, subject.tokenizer.eos_id
    pairs = [("Open a jar", " Turn"), (LONG, " and then some"), ("", "Turn it"), ("Open a ", "jar"), (" ", "jar")]
    actual = subject_lm(subject).loglikelihood(instances("loglikelihood", *pairs))
    for (context, continuation), answer in zip(pairs, actual, strict=True):
        whole, start = encode(context + continuation), encode(context.rstrip(" ")) or [eos]
        rest = whole if start == [eos] else whole[len(start) :]
        expected = direct(subject.model, start, rest)
        assert answer == (pytest.approx(expected[0], abs=1e-4), expected[1])
    assert len(encode(LONG)) > 5 * subject.context_length


def test_tasks_over_local_files_give_the_models_numbers(subject: LoadedModel, data: Callable[..., Path]) -> None:
    """LAMBADA's perplexity and PIQA's accuracies, from their documents alone."""
    encode = subject.tokenizer.encode
    folder = data("piqa.jsonl", *PIQA)
    passages = [LONG.strip(), "She said hello to the green cat"]
    data("lambada_openai.jsonl", *({"text": text} for text in passages))

    scores = []
    for text in passages:
        context, last = text.rsplit(" ", 1)
        tokens, start = encode(text), len(encode(context))
        assert encode(f"{context} {last}") == tokens
        scores.append(direct(subject.model, tokens[:start], tokens[start:]))
    task = lm_eval_task("lambada_openai")(Options(data=str(folder)))
    (cell,) = task.cells(subject)
    rows = {row["metric"]: row for row in task.run(subject, cell)}
    assert math.log(rows["perplexity"]["value"]) == pytest.approx(-sum(s[0] for s in scores) / 2, abs=1e-4)
    assert rows["acc"]["value"] == sum(s[1] for s in scores) / 2

    right = {"acc": 0, "acc_norm": 0}
    for doc in PIQA:
        context, choices = f"Question: {doc['goal']}\nAnswer:", [doc["sol1"], doc["sol2"]]
        start = len(encode(context))
        whole = [encode(f"{context} {choice}") for choice in choices]
        actual = [direct(subject.model, tokens[:start], tokens[start:])[0] for tokens in whole]
        right["acc"] += actual.index(max(actual)) == doc["label"]
        by_length = [score / len(choice) for score, choice in zip(actual, choices, strict=True)]
        right["acc_norm"] += by_length.index(max(by_length)) == doc["label"]
    task = lm_eval_task("piqa")(Options(data=str(folder)))
    (cell,) = task.cells(subject)
    rows = {row["metric"]: row for row in task.run(subject, cell)}
    assert {metric: row["value"] for metric, row in rows.items()} == {m: pytest.approx(n / 3) for m, n in right.items()}
    assert all(row["count"] == 3 and row["low"] <= row["value"] <= row["high"] for row in rows.values())


def test_rolling_log_likelihood_is_that_of_the_whole_text(subject: LoadedModel, subject_lm: Any) -> None:
    actual = subject_lm(subject).loglikelihood_rolling(instances("loglikelihood_rolling", (LONG,), ("a cat",)))
    for text, answer in zip((LONG, "a cat"), actual, strict=True):
        tokens = subject.tokenizer.encode(text)
        assert answer == pytest.approx(direct(subject.model, [subject.tokenizer.eos_id], tokens)[0], rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("max_length", [None, 2, 7, 10, 11, 12, 64])
def test_rolling_counts_every_token_once(subject_lm: Any, max_length: int | None) -> None:
    asked = Answering()
    text = "0123456789"
    (total,) = subject_lm(asked, max_length).loglikelihood_rolling(instances("loglikelihood_rolling", (text,)))
    assert total == -len(text)
    assert [token for _, continuation in asked.requests for token in continuation] == list(text.encode())
    lengths = [len(context) + len(continuation) - 1 for context, continuation in asked.requests]  # that are read
    assert max(lengths) == min(max_length or 10, 10)
    assert len(lengths) == 1 or max_length < 10


def test_answers_end_before_their_stop_strings(subject_lm: Any) -> None:
    asked = Answering(lambda prompt: f" forty-two, {prompt}\nand. More")
    requests = instances(
        "generate_until",
        ("a", {"until": ["\n"], "max_gen_toks": 48}),
        ("b", {"until": [".", "\n"], "max_gen_toks": 48}),
        ("c", {"until": [], "max_gen_toks": 6}),
        ("d", {"until": "e", "max_gen_toks": 48, "temperature": 1.0, "do_sample": False}),
    )
    actual = subject_lm(asked).generate_until(requests)
    assert actual == [" forty-two, a", " forty-two, b", " forty", " forty-two, d\nand. Mor"]


def test_answers_are_not_sampled(subject_lm: Any) -> None:
    with pytest.raises(UserError, match="greedily only"):
        subject_lm(Answering()).generate_until(instances("generate_until", ("a", {"do_sample": True})))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams is 4, which is not supported; only 1 is"),
        ({"repetition_penalty": 1.2}, "repetition_penalty is 1.2, which is not supported; only 1 is"),
        ({"min_new_tokens": 8}, "min_new_tokens is 8, which is not supported; only 0 is"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size is 3"),
        ({"max_length": 64}, "max_length is 64, which is not supported$"),
        ({"bad_words_ids": [[1]]}, "bad_words_ids is"),
        ({"stopping_criteria": "x"}, "stopping_criteria is 'x'"),
    ],
)
def test_options_that_would_change_answers(subject_lm: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"lm_eval: the task's {message}"):
        subject_lm(Answering()).generate_until(instances("generate_until", ("a", {"until": ["\n"], **options})))


def test_options_that_change_no_answer(subject_lm: Any) -> None:
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "min_new_tokens": 0, "top_p": 0.9, "top_k": None}
    requests = instances("generate_until", ("a", {"until": ["b"], "max_gen_toks": 3, "do_sample": False, **neutral}))
    assert subject_lm(Answering(lambda prompt: "xyb")).generate_until(requests) == ["xy"]


def test_nothing_is_cut_unless_asked_and_then_it_is_told(subject_lm: Any, caplog: pytest.LogCaptureFixture) -> None:
    asked = Answering()
    pair = ("x" * 500 + "abcdefg", "hi")
    with caplog.at_level(logging.WARNING, "zoo"):
        subject_lm(asked).loglikelihood(instances("loglikelihood", pair))
        assert len(asked.requests[-1][0]) == 507
        assert not caplog.messages
        subject_lm(asked, 9).loglikelihood(instances("loglikelihood", pair, ("a", "b")))
        assert [bytes(context) for context, _ in asked.requests[-2:]] == [b"xabcdefg", b"a"]
        assert caplog.messages == ["1 of 2 prompts lost their beginnings: max_length is 9."]
        subject_lm(asked, 9).generate_until(instances("generate_until", (pair[0], {"max_gen_toks": 5})))
        assert asked.prompts[-1] == "defg"
    with pytest.raises(UserError, match="max_length is 2, but must be more than the 2 tokens that are read after"):
        subject_lm(asked, 2).loglikelihood(instances("loglikelihood", (pair[0], "hi!")))


def test_text_starts_as_documents_do(subject_lm: Any) -> None:
    asked = Answering()
    asked.tokenizer.bos_id = 7
    lm = subject_lm(asked)
    lm.loglikelihood(instances("loglikelihood", ("ab", "c"), ("", "c")))
    assert asked.requests == [([7, *b"ab"], [*b"c"]), ([7], [*b"c"])]
    lm.loglikelihood_rolling(instances("loglikelihood_rolling", ("ab",)))
    assert asked.requests[-1] == ([7], [*b"ab"])
