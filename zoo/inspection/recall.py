"""The margin by which each layer reads the right value, to see in which layer recall breaks."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from kernels import UserError
from zoo.data.batch import NO_LOSS
from zoo.data.synthetic.recall import Recall, RecallTask
from zoo.display import new_table
from zoo.lm.model import LanguageModel

from .calls import calls_of_model
from .layer import Layer

SAMPLES = 8  # prompts for each number of pairs


class Questions(NamedTuple):
    """The tokens of a prompt that ask for values."""

    read: Tensor  # their positions [Q]
    right: Tensor  # rows of `places` with the values that they ask for [Q]
    places: Tensor  # positions [N,P] at which each of N values may have been written


def margins(layer: Layer, questions: Questions) -> Tensor:
    """For each head and question [H,Q], |A| at the right value less the largest |A| at another one.

    |A| is divided by the sum of its row, so that margins lie between −1 and 1; the largest place of a value counts.
    """
    margin, right = [], questions.right[:, None]
    for head in range(layer.heads):
        matrix = layer.attention(head)[questions.read].abs().unflatten(1, (-1, layer.steps)).sum(-1)
        values = (matrix / matrix.sum(-1, keepdim=True).clamp(min=1e-300))[:, questions.places].amax(-1)
        margin.append(values.gather(1, right)[:, 0] - values.scatter(1, right, 0.0).amax(1))
    return torch.stack(margin)


def of_layers(model: LanguageModel, prompts: Iterable[tuple[Tensor, Questions]]) -> list[dict[str, Any]]:
    """For each layer with matrices, the best head's median margin, and the share of questions where it is positive."""
    asked = [(calls_of_model(model, tokens), questions) for tokens, questions in prompts]
    rows = []
    for number, mixer in enumerate(model.mixers):
        parts = [margins(Layer(calls[number][-1]), questions) for calls, questions in asked if calls[number]]
        if parts:
            margin = torch.cat(parts, 1).amax(0)
            numbers = {"margin": float(margin.median()), "read": float((margin > 0).double().mean())}
            rows.append({"layer": number, "mixer": type(mixer).__name__, **numbers})
    return rows


def recall(model: LanguageModel, pairs: Sequence[int]) -> list[dict[str, Any]]:
    """For each number of pairs, the share of questions that a model of `zoo.data.MQAR` answers, and `of_layers`.

    A prompt has four tokens for each pair, and at least 64.

    Raises:
        UserError: A number of pairs does not fit the vocabulary.
    """
    rows, device = [], next(model.parameters()).device
    for count in pairs:
        if not 1 <= count < model.vocab_size // 2:
            raise UserError(f"pairs: {count} is not from 1 to {model.vocab_size // 2 - 1}, half of the vocabulary")
        task = Recall(RecallTask(max(64, 4 * count), count), SAMPLES, model.vocab_size, True, 0.01, "0 inspect")
        batch = task.batch(range(SAMPLES))
        with torch.no_grad():
            predicted = model(batch.tokens.to(device))[0].argmax(-1).cpu()
        asked = batch.labels != NO_LOSS
        places = torch.arange(2 * count).view(count, 2)  # of a key, and of its value
        prompts = []
        for tokens, of_prompt in zip(batch.tokens, asked, strict=True):
            read = of_prompt.nonzero()[:, 0]
            right = (tokens[read, None] == tokens[0 : 2 * count : 2]).int().argmax(1)
            prompts.append((tokens[None].to(device), Questions(read, right, places)))
        answered = float((predicted == batch.labels)[asked].double().mean())
        rows.append({"pairs": count, "answered": answered, "layers": of_layers(model, prompts)})
    return rows


def recall_of_answer(model: LanguageModel, prompt: Sequence[int], answer: Sequence[int]) -> list[dict[str, Any]]:
    """`of_layers` for the tokens of an answer after a prompt that has them once, such as a needle in a haystack.

    Raises:
        UserError: The prompt does not have them once.
    """
    starts = [i for i in range(len(prompt)) if [*prompt[i : i + len(answer)]] == [*answer]]
    if len(starts) != 1 or not answer:
        raise UserError(f"answer: its tokens, with their spaces, must be in the prompt once, not {len(starts)} times")
    steps = torch.arange(len(answer))
    questions = Questions(len(prompt) - 1 + steps, starts[0] + steps, torch.arange(len(prompt))[:, None])
    tokens = torch.tensor([[*prompt, *answer]], device=next(model.parameters()).device)
    return of_layers(model, [(tokens, questions)])


def recall_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each number of pairs: the model's accuracy, and each layer's share of values read, with its margin."""
    layers = [f"{layer['layer']} {layer['mixer']}" for layer in rows[0]["layers"]]
    further = [name for name in ("pairs", "answered") if name in rows[0]]
    table = new_table([*further, *layers], left=0, title="values that a layer reads (median margin)")
    for row in rows:
        cells = [f"{row[name]:.0%}" if name == "answered" else str(row[name]) for name in further]
        table.add_row(*cells, *(f"{layer['read']:.0%} ({layer['margin']:+.2f})" for layer in row["layers"]))
    return table
