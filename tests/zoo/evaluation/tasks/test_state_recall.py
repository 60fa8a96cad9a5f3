"""The longest context that a model recalls."""

from collections.abc import Sequence

from reproductions.state_recall import StateRecall, longest_context
from tests.zoo.evaluation.subjects import Reader
from zoo.data import Tokenizer
from zoo.evaluation.task import Options


def test_the_longest_context_ends_where_recall_first_drops():
    recall = {512: 0.9, 1024: 0.7, 1536: 0.55, 2048: 0.75}
    assert [longest_context(recall, threshold) for threshold in (0.5, 0.6, 0.7, 0.8, 0.95)] == [
        2048,
        1024,
        1024,
        512,
        0,
    ]


def test_a_model_that_remembers_its_last_tokens_recalls_short_contexts(tokenizers: dict[str, Tokenizer]):
    class Forgetful(Reader):
        """Does not know what came more than 600 tokens ago."""

        def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
            return [
                super(Forgetful, self).continuations([prompt], max_new_tokens)[0] if len(prompt) <= 600 else []
                for prompt in prompts
            ]

    task = StateRecall(Options(lengths=(300, 600, 900), samples=2))
    subject = Forgetful(tokenizers["large"])
    rows = [row for cell in task.cells(subject) for row in task.run(subject, cell)]
    assert [(row["length"], row["value"], row["state_size"]) for row in rows] == [
        (300, 1, 4096),
        (600, 1, 4096),
        (900, 0, 4096),
    ]
    assert [(row["metric"], row["value"], row["state_size"]) for row in task.summary(rows)] == [
        (f"longest_context_at_{threshold}", 600, 4096) for threshold in (0.5, 0.6, 0.7, 0.8)
    ]
