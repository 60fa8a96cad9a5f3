"""`inspect`: what the layers of a model remember of a text."""

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from kernels import Option, UserError
from zoo.data.text.tokenizer import Tokenizer
from zoo.display import new_console, new_table, write_figure
from zoo.files.atomic import atomic_write
from zoo.files.output import make_folder
from zoo.lm.classifier import check_predicts_tokens
from zoo.lm.model import LanguageModel
from zoo.saved.model import SavedModel
from zoo.train.devices import check_device, pick_device

from . import pictures
from .calls import calls_of_model
from .layer import Layer
from .recall import recall, recall_of_answer, recall_table, sample

if TYPE_CHECKING:
    Model: TypeAlias = str | Path | LanguageModel
    Text: TypeAlias = str | Sequence[int] | Tensor
else:  # the command line reads the types, and has one text and no models
    Model, Text = str | Path, str

STATES, LONGEST_PICTURE = 32, 512  # over a text; tokens of the pictures over pairs of tokens


class Inspection:
    """The memory that the layers of a model have of a text.

    Attributes:
        tokens: The text of each token.
        mixers: The mixer's class of each layer.
        layers: By number, the layers whose output is a sum of values over pairs of tokens. Others, such as HGRN1 and
            Mamba1, have a state in each channel.
        recall: Which layers read the right values, if questions were asked.
    """

    def __init__(
        self, tokens: list[str], mixers: list[str], layers: dict[int, Layer], every: int, recall: list[dict[str, Any]]
    ):
        self.tokens, self.mixers, self.layers, self.every, self.recall = tokens, mixers, layers, every, recall

    @cached_property
    def numbers(self) -> list[dict[str, Any]]:
        """For each matrix state half-lives (10, 50, 90 % of heads and channels), ranks and norms over the text."""
        rows = []
        for layer in self.layers.values():
            if layer.has_state:
                states, lives = layer.spectra(self.every), layer.half_lives().flatten().sort().values
                lives = lives[[int(share * (len(lives) - 1)) for share in (0.1, 0.5, 0.9)]]
                row = {"layer": layer.number, "mixer": layer.name, "heads": layer.heads, "subheads": layer.subheads}
                row |= {"half_lives": [None if math.isinf(x) else x for x in lives.tolist()]}
                row |= {"steep_share": layer.steep_share(), "largest_rank": states.values.shape[-1]}
                row |= {"ends": states.ends.tolist(), "effective_ranks": states.effective_ranks.tolist()}
                rows.append(row | {"norms": states.norms.tolist()})
        return rows

    def table(self) -> Table:
        """A row for each layer."""
        columns = ("layer", "mixer", "heads", "half-life: 10 %", "50 %", "90 %", "steep", "rank", "used", "norm")
        table = new_table(columns, left=2, title=f"{len(self.tokens)} tokens")
        rows = {row["layer"]: row for row in self.numbers}
        for number, name in enumerate(self.mixers):
            cells = [str(number), name]
            if row := rows.get(number):
                heads = f"{row['heads']}" + (f" × {row['subheads']}" if row["subheads"] > 1 else "")
                lives = ["∞" if x is None else f"{x:,.3g}" for x in row["half_lives"]]
                rank, norm = fmean(row["effective_ranks"][-1]), fmean(row["norms"][-1])
                cells += [heads, *lives, f"{row['steep_share']:.0%}", f"{rank:.1f} of {row['largest_rank']}"]
                cells += [f"{rank / row['largest_rank']:.0%}", f"{norm:.3g}"]
            table.add_row(*cells)
        table.caption = "Half-lives in tokens. Steep: e^-69 within 32 tokens. Used: last rank over the largest."
        return table

    def figures(self, layer: int | None = None) -> dict[str, Figure]:
        """The pictures by name: all heads of a layer, or one head of every layer.

        Raises:
            UserError: The layer does not exist, or has no matrices.
        """
        if layer is not None and layer not in self.layers:
            raise UserError(f"layer: {layer} must be one of those with matrices: {', '.join(map(str, self.layers))}")
        chosen = [*self.layers.values()] if layer is None else [self.layers[layer]]
        states, short = [each for each in chosen if each.has_state], len(self.tokens) <= LONGEST_PICTURE
        figures = {"attention": pictures.attention(chosen, self.tokens)} if short and chosen else {}
        figures |= {"retention": pictures.retention(states)} if short and states else {}
        return figures | ({"spectra": pictures.spectra(states, self.every)} if states else {})

    def save(self, folder: str | Path, layer: int | None = None) -> Path:
        """Write `inspection.json` and the pictures into a folder, and return it."""
        figures, folder = self.figures(layer), Path(folder)
        make_folder(folder, "output")
        for name, figure in figures.items():
            write_figure(figure, folder / f"{name}.png")
        contents = {"tokens": self.tokens, "layers": self.numbers, "recall": self.recall}
        with atomic_write(folder / "inspection.json") as file:
            file.write(json.dumps(contents, indent=1, ensure_ascii=False).encode())
        return folder


def inspect(
    checkpoint: Model,
    prompt: Text = "",
    answer: str = "",
    pairs: list[int] | None = None,
    every: int | None = None,
    layer: int | None = None,
    output: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    device: str | None = None,
    trust: bool = False,
    verbose: bool = True,
) -> Inspection:
    """Look into the states of a model after a text: exact attention matrices, retention, spectra, half-lives.

    ``zoo.inspect("runs/first", "def f(x):").layers[0].attention(head=0)``

    Args:
        checkpoint: As for `generate`; in Python also a model of `zoo.load` or `zoo.fit`.
        prompt: The text. In Python also token ids.
        answer: Text that the prompt has once: shows which layers read it there, if it follows the prompt.
        pairs: Shows which layers read the values of so many key-value pairs, in the head that reads most; for models
            that were trained on MQAR, in place of a prompt.
        every: Tokens between two states whose singular values are computed; null for 32 states.
        layer: Draw all heads of this layer, from 0; by default the first head of every layer.
        output: Folder for inspection.json, attention.png, retention.png and spectra.png; null for none. The pictures of
            attention and retention need a text of at most 512 tokens.
        tokenizer: That of a model in memory, from `zoo.load_tokenizer`; a saved model has one.
        device: Where to run the model: cpu, cuda, mps; null for the GPU if available.
        trust: Whether to import and call what the model's config names, even if someone else wrote it.
        verbose: Whether to print the tables.

    Raises:
        UserError: The model does not exist, is a classifier or has no tokenizer, or an argument is out of range.
    """
    if every is not None and every < 1:
        raise UserError(f"every: {every} must be at least 1")
    if device is not None:
        check_device(device, meta=False)
    if isinstance(checkpoint, LanguageModel):
        model = checkpoint
    else:
        saved = SavedModel.open(checkpoint, trust)
        model = saved.load(device or pick_device(None))
        if pairs and saved.tokenizer is not None:
            raise UserError("pairs: the model reads text; give a prompt, and by answer a part of it")
        if isinstance(prompt, str) and not pairs:
            if saved.tokenizer is None and not prompt:
                sentence = (
                    "prompt: the model has no tokenizer; one that was trained on key-value pairs is inspected by "
                )
                raise UserError(sentence, Option("pairs", "[4]"))
            tokenizer = saved.required_tokenizer
    check_predicts_tokens(model, "inspect")
    training = model.training
    model.eval()
    try:
        rows = recall(model, pairs) if pairs else []
        ids = _ids(prompt, tokenizer) if len(prompt) or not pairs else sample(model, pairs[-1])[0][0].tolist()
        if answer:
            rows = [{"layers": recall_of_answer(model, ids, _ids(answer, tokenizer))}]
        calls = calls_of_model(model, torch.tensor([ids], device=next(model.parameters()).device))
    finally:
        model.train(training)
    texts = [str(i) for i in ids] if tokenizer is None else [tokenizer.decode([i]) for i in ids]
    names = [type(mixer).__name__ for mixer in model.mixers]
    layers = {i: Layer(c[-1], i, names[i], model.mixers[i].write_delay) for i, c in enumerate(calls) if c}
    made = Inspection(texts, names, layers, every or -(-len(ids) // STATES), rows)
    folder = None if output is None else made.save(output, layer)
    console = new_console(verbose)
    if not pairs:
        console.print(made.table())
    if rows:
        console.print(recall_table(rows))
    if folder is not None:
        console.print(str(folder), style="dim", soft_wrap=True)
    return made


def _ids(text: Text, tokenizer: Tokenizer | None) -> list[int]:
    """The token ids of a text, or those given."""
    if not isinstance(text, str):
        ids: list[int] = torch.as_tensor(text).flatten().tolist()
    elif tokenizer is None:
        raise UserError("prompt: a model in memory needs a tokenizer for text, or token ids such as [1, 2, 3]")
    else:
        ids = tokenizer.encode(text)
    if not ids:
        raise UserError("prompt: is empty; give a text of at least one token")
    return ids
