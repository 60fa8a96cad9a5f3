"""`zoo.scaling.count`: parameters and FLOPs of models by the conventions that papers use, side by side."""

from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

import mixers
from mixers.arguments import check_sizes
from zoo.config.build import from_config
from zoo.config.parser import read
from zoo.display import new_table
from zoo.lm.size_table import parameters_without_embeddings

TRAINING = 3  # forward and backward pass, in forward passes
# of each registered mixer, where no configs are given: 1.3B parameters or so
SHAPE = {"hidden_size": 2048, "num_heads": 16, "num_layers": 24, "vocab_size": 32000}


class Count(NamedTuple):
    """A model in numbers; FLOPs are of training, per token.

    Attributes:
        model: Its config or its mixer.
        parameters: All.
        without_embeddings: Without the embedding and the head over the vocabulary.
        flops: Products as they are executed, with the head, and with the whole square of attention.
        causal: The same without the pairs of tokens that attention's mask leaves out.
        without_head: As `flops`, without the head.
        six_n: 6 per parameter without embeddings.
        six_n_all: 6 per parameter.
    """

    model: str
    parameters: int
    without_embeddings: int
    flops: float
    causal: float
    without_head: float
    six_n: int
    six_n_all: int


def count(models: list[str] | str | None = None, length: int = 4096, verbose: bool = True) -> list[Count]:
    """Count parameters and training FLOPs by each convention: with embeddings or without, attention causal or full, 6N.

    ``zoo.scaling.count(["gla.yaml", "transformer.yaml"], length=8192)``

    Args:
        models: Configs, as a list or separated by commas; on the command line as plain arguments. Null: every
            registered causal mixer, in 24 layers of 2048 channels with MLPs.
        length: Tokens in a sequence.
        verbose: Whether to print a table.

    Returns:
        A row for each model.

    Raises:
        UserError: A config does not exist, or the length is below 1.
    """
    check_sizes({"length": length})
    if models is None:
        causal = [name for name in mixers.names() if mixers.get(name).causal]  # language models
        shaped = [{"model": {**SHAPE, "stack": {"mixer": {"class_path": name}}}} for name in causal]
        rows = [_counted(name, ["transformer.yaml", over], length) for name, over in zip(causal, shaped, strict=True)]
    else:
        names = models.split(",") if isinstance(models, str) else models
        rows = [_counted(name, [name], length) for name in names]
    if verbose:
        Console().print(_table(rows, length), highlight=False)
    return rows


def _counted(name: str, config: list[Any], length: int) -> Count:
    parsed = read(*config)
    parsed.model.vocab_size = parsed.model.vocab_size or parsed.data.init_args.get("vocab_size") or SHAPE["vocab_size"]
    model = from_config(parsed, device="meta")
    every, inside = model.num_parameters(), parameters_without_embeddings(model)
    full = TRAINING * model.flops(length) / length
    masked = TRAINING * sum(mixer.masked_flops(length) for mixer in model.mixers) / length
    blocks = sum(mixer.flops(length) for mixer in model.mixers) + sum(mlp.flops(length) for mlp in model.mlps)
    return Count(name, every, inside, full, full - masked, TRAINING * blocks / length, 6 * inside, 6 * every)


def _table(rows: list[Count], length: int) -> Table:
    columns = ("model", "parameters", "non-emb.", "as executed", "causal", "no head", "6N", "6N, all")
    shown = new_table(columns, wrapped=["model"])
    for row in rows:
        _, *numbers = row
        shown.add_row(row.model, *(f"{number / 1e6:,.1f}" for number in numbers))
    shown.caption = (
        f"millions of parameters; training MFLOPs per token at {length} tokens, three forward passes: products as "
        "executed, with the whole square of attention; causal: without what its mask leaves out; no head: without the "
        "head over the vocabulary; "
        "6N: six per parameter, without embeddings or with all"
    )
    return shown
