"""The margin by which each layer reads the right value, to see in which layer recall breaks."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from kernels import UserError
from zoo.data.batch import NO_LOSS
from zoo.data.synthetic.recall import Recall, RecallTask
from zoo.display import new_table
from zoo.lm.model import LanguageModel

from .calls import calls_of_model
from .layer import Layer

SAMPLES, LATEST = 8, 3  # prompts for each number of pairs; tokens by which short convolutions delay a value


class Questions(NamedTuple):
    """The tokens of a prompt that ask for values."""

    read: Tensor  # their positions [Q]
    right: Tensor  # entries of `places` with the values that they ask for [Q]
    places: Tensor  # positions of values [N]


def margins(layer: Layer, questions: Questions) -> Tensor:
    """For each head, delay and question [H,D,Q], |A| at the right value less the largest |A| at another one.

    A value may be written up to `LATEST` tokens after its token. |A| is divided by the sum of its row.
    """
    margin, right = [], questions.right[:, None]
    for head in range(layer.heads):
        matrix = layer.attention(head)[questions.read].abs().unflatten(1, (-1, layer.steps)).sum(-1)
        matrix = F.pad(matrix / matrix.sum(-1, keepdim=True).clamp(min=1e-300), (0, LATEST))
        for delay in range(LATEST + 1):
            values = matrix[:, questions.places + delay]
            margin.append(values.gather(1, right)[:, 0] - values.scatter(1, right, 0.0).amax(1))
    return torch.stack(margin).unflatten(0, (layer.heads, -1))


def of_layers(model: LanguageModel, prompts: Iterable[tuple[Tensor, Questions]]) -> list[dict[str, Any]]:
    """For each layer with matrices, the head and delay with most positive margins, their share and their median."""
    asked = [(calls_of_model(model, tokens), questions) for tokens, questions in prompts]
    rows = []
    for number, mixer in enumerate(model.mixers):
        parts = [margins(Layer(calls[number][-1]), questions) for calls, questions in asked if calls[number]]
        if parts:
            margin = torch.cat(parts, 2)
            read = (margin > 0).double().mean(2)
            head, delay = divmod(int(read.argmax()), LATEST + 1)
            row = {"layer": number, "mixer": type(mixer).__name__, "head": head, "delay": delay}
            rows.append(row | {"margin": float(margin[head, delay].median()), "read": float(read[head, delay])})
    return rows


def recall(model: LanguageModel, pairs: Sequence[int]) -> list[dict[str, Any]]:
    """For each number of pairs, the share of questions that a model of `zoo.data.MQAR` answers, and `of_layers`.

    Raises:
        UserError: A number of pairs does not fit the vocabulary.
    """
    rows, device = [], next(model.parameters()).device
    for count in pairs:
        samples, labels = sample(model, count)
        with torch.no_grad():
            predicted = model(samples.to(device))[0].argmax(-1).cpu()
        asked = labels != NO_LOSS
        prompts = []
        for tokens, of_prompt in zip(samples, asked, strict=True):
            read = of_prompt.nonzero()[:, 0]
            right = (tokens[read, None] == tokens[0 : 2 * count : 2]).int().argmax(1)
            prompts.append((tokens[None].to(device), Questions(read, right, 2 * torch.arange(count) + 1)))
        answered = float((predicted == labels)[asked].double().mean())
        rows.append({"pairs": count, "answered": answered, "layers": of_layers(model, prompts)})
    return rows


def sample(model: LanguageModel, count: int) -> tuple[Tensor, Tensor]:
    """The tokens and labels of SAMPLES prompts with so many pairs.

    Raises:
        UserError: The number of pairs does not fit the vocabulary.
    """
    if not 1 <= count < model.vocab_size // 2:
        raise UserError(f"pairs: {count} is not from 1 to {model.vocab_size // 2 - 1}, half of the vocabulary")
    task = Recall(RecallTask(max(64, 4 * count), count), SAMPLES, model.vocab_size, True, 0.01, "0 inspect")
    batch = task.batch(range(SAMPLES))
    return batch.tokens, batch.labels


def recall_of_answer(model: LanguageModel, prompt: Sequence[int], answer: Sequence[int]) -> list[dict[str, Any]]:
    """`of_layers` for the tokens of an answer after a prompt that has them once, such as a needle in a haystack.

    Raises:
        UserError: The prompt does not have them once.
    """
    starts = [i for i in range(len(prompt)) if [*prompt[i : i + len(answer)]] == [*answer]]
    if len(starts) != 1 or not answer:
        raise UserError(f"answer: its tokens, with their spaces, must be in the prompt once, not {len(starts)} times")
    steps = torch.arange(len(answer))
    questions = Questions(len(prompt) - 1 + steps, starts[0] + steps, torch.arange(len(prompt)))
    tokens = torch.tensor([[*prompt, *answer]], device=next(model.parameters()).device)
    return of_layers(model, [(tokens, questions)])


def recall_table(rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each number of pairs: the model's accuracy, and the share of values that each layer reads."""
    layers = [f"{layer['layer']} {layer['mixer']}" for layer in rows[0]["layers"]]
    further = [name for name in ("pairs", "answered") if name in rows[0]]
    table = new_table([*further, *layers], left=0, title="values that the best head of a layer reads (margin)")
    for row in rows:
        cells = [f"{row[name]:.0%}" if name == "answered" else str(row[name]) for name in further]
        table.add_row(*cells, *(f"{layer['read']:.0%} ({layer['margin']:+.2f})" for layer in row["layers"]))
    return table
