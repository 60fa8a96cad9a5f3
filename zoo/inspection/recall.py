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


class Question(NamedTuple):
    """A token that asks for a value."""

    read: int  # its position
    right: int  # row of `places` with the value that it asks for
    places: Tensor  # positions [N,P] at which each of N values may have been written


def margins(layer: Layer, questions: Sequence[Question]) -> Tensor:
    """For each head and question [H,Q], |A| at the right value less the largest |A| at another one.

    |A| is divided by the sum of its row, so that margins lie between −1 and 1; the largest place of a value counts.
    """
    margin = torch.empty(layer.heads, len(questions), dtype=torch.float64)
    for head in range(layer.heads):
        matrix = layer.attention(head).abs().unflatten(1, (-1, layer.steps)).sum(-1)
        matrix /= matrix.sum(-1, keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
        for number, (read, right, places) in enumerate(questions):
            values = matrix[read][places].amax(1)
            others = values[torch.arange(len(values)) != right]
            margin[head, number] = values[right] - (others.max() if len(others) else 0.0)
    return margin


def of_layers(model: LanguageModel, prompts: Iterable[tuple[Tensor, Sequence[Question]]]) -> list[dict[str, Any]]:
    """For each layer with matrices, the best head's median margin, and the share of questions where it is positive."""
    margins_of: dict[int, list[Tensor]] = {}
    for tokens, questions in prompts:
        for number, calls in enumerate(calls_of_model(model, tokens)):
            if calls:
                margins_of.setdefault(number, []).append(margins(Layer(calls[-1]), questions).amax(0))
    rows = []
    for number, parts in margins_of.items():
        margin, name = torch.cat(parts), type(model.mixers[number]).__name__
        read = float((margin > 0).double().mean())
        rows.append({"layer": number, "mixer": name, "margin": float(margin.median()), "read": read})
    return rows


def recall(model: LanguageModel, pairs: Sequence[int], samples: int = SAMPLES, seed: int = 0) -> list[dict[str, Any]]:
    """Ask a model that was trained on `zoo.data.MQAR`, and see which layers read the right values.

    Args:
        model: The model.
        pairs: Numbers of key-value pairs; a prompt has four tokens for each, and at least 64.
        samples: Number of prompts for each number of pairs.
        seed: Number of the random prompts.

    Returns:
        For each number of pairs, `answered` (the share of questions that the model answers) and `layers`.

    Raises:
        UserError: A number of pairs does not fit the vocabulary.
    """
    rows, device = [], next(model.parameters()).device
    for count in pairs:
        if not 1 <= count < model.vocab_size // 2:
            raise UserError(f"pairs: {count} is not from 1 to {model.vocab_size // 2 - 1}, half of the vocabulary")
        task = Recall(RecallTask(max(64, 4 * count), count), samples, model.vocab_size, True, 0.01, f"{seed} inspect")
        batch = task.batch(range(samples))
        with torch.no_grad():
            predicted = model(batch.tokens.to(device))[0].argmax(-1).cpu()
        asked = batch.labels != NO_LOSS
        places = torch.arange(2 * count).view(count, 2)  # of a key, and of its value
        prompts = []
        for tokens, of_prompt in zip(batch.tokens, asked, strict=True):
            right = {int(key): i for i, key in enumerate(tokens[0 : 2 * count : 2])}
            questions = [Question(int(t), right[int(tokens[t])], places) for t in of_prompt.nonzero()]
            prompts.append((tokens[None].to(device), questions))
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
    places = torch.arange(len(prompt))[:, None]
    read = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    questions = [Question(t, starts[0] + i, places) for i, t in enumerate(read)]
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
