"""Pictures of a layer's memory: matrices over pairs of tokens, retention, spectra."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

from zoo.display import new_figure

from .layer import Layer

MOST_COLUMNS, MOST_LABELS = 4, 64  # panels in a row; tokens whose text is written at the axes
QUANTILES = (0.1, 0.5, 0.9)


def panels(titles: Sequence[str], size: float, x: str, y: str) -> tuple[Figure, list[Axes]]:
    """A grid of panels, each `size` inches wide and high, with the labels of their axes."""
    columns = min(len(titles), MOST_COLUMNS)
    rows = -(-len(titles) // columns)
    figure = new_figure(size * columns + 0.8, size * rows + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axis in axes[len(titles) :]:
        axis.axis("off")
    for number, (axis, title) in enumerate(zip(axes, titles, strict=False)):
        axis.set_title(title, fontsize=8)
        axis.set_xlabel(x, fontsize=7)
        axis.set_ylabel(y if number % columns == 0 else "", fontsize=7)
        axis.tick_params(labelsize=6)
    return figure, axes[: len(titles)]


def heads_of(layers: Sequence[Layer]) -> dict[str, tuple[Layer, int]]:
    """All heads of a layer, or the first head of each of several, by their titles."""
    pairs = [(layer, head) for layer in layers for head in range(layer.heads if len(layers) == 1 else 1)]
    return {f"layer {layer.number}, head {head}: {layer.name}": (layer, head) for layer, head in pairs}


def attention(layers: Sequence[Layer], tokens: Sequence[str]) -> Figure:
    """A heat map of A for each head, with tokens as labels where they are few; signed, on a scale of logarithms."""
    heads, labelled = heads_of(layers), len(tokens) <= MOST_LABELS
    size = max(2.6, 0.13 * len(tokens)) if labelled else 3.2
    figure, axes = panels([*heads], size, "written", "read")
    shown = [_label(token) for token in tokens]
    for axis, (layer, head) in zip(axes, heads.values(), strict=True):
        matrix = layer.attention(head)
        largest = max(float(matrix.abs().max()), 1e-12)
        norm = SymLogNorm(largest / 100, vmin=-largest, vmax=largest)
        image = axis.imshow(matrix, cmap="RdBu", norm=norm, aspect="auto", interpolation="nearest")
        bar = figure.colorbar(image, ax=axis, ticks=[-largest, 0, largest], fraction=0.05, format="{x:.2g}")
        bar.ax.tick_params(labelsize=6)
        if labelled:
            axis.set_yticks(range(len(tokens)), shown, fontsize=5)
            written = ["", *shown[:-1]] if layer.write_delay else shown
            axis.set_xticks([layer.steps * i for i in range(len(tokens))], written, fontsize=5, rotation=90)
    return figure


def _label(token: str) -> str:
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣").replace("$", r"\$")
    return "".join(c if c.isprintable() else "\ufffd" for c in shown)[:10]


def retention(layers: Sequence[Layer]) -> Figure:
    """Median share of a write that is left, and that decays and later writes took, over the tokens since."""
    heads = heads_of(layers)
    figure, axes = panels([*heads], 2.6, "tokens since the write", "share (median, 10 to 90 %)")
    for axis, (layer, head) in zip(axes, heads.values(), strict=True):
        shares = layer.retention(head)
        for name, colour in (("left", "C0"), ("decayed", "C1"), ("erased", "C3")):
            low, middle, high = _by_distance(getattr(shares, name)[:, layer.steps - 1 :: layer.steps].numpy())
            axis.plot(middle, color=colour, label=name, linewidth=1.2)
            axis.fill_between(range(len(middle)), low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_ylim(-0.3, 1.3)
    axes[0].legend(fontsize=6, frameon=False)
    return figure


def _by_distance(x: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> list[list[float]]:
    """Quantiles over the writes of x [T,T] by distance; distances of few writes are left out."""
    longest = len(x) - min(8, max(1, len(x) // 4))
    return [[float(np.nanquantile(np.diagonal(x, -i), q)) for i in range(longest + 1)] for q in QUANTILES]


def spectra(layers: Sequence[Layer], every: int) -> Figure:
    """Singular values of the states over the text, medians over heads, and their mean effective rank."""
    titles = [f"layer {layer.number}: {layer.name}" for layer in layers]
    figure, axes = panels(titles, 2.8, "tokens", "singular values (blue)")
    for axis, layer in zip(axes, layers, strict=True):
        states = layer.spectra(every)
        values = states.values.median(1).values  # those of directions without writes are rounding errors
        values = values.where(values > 1e-6 * values.max(), torch.nan)
        for rank, share in enumerate(torch.linspace(0.15, 0.9, values.shape[1]).tolist()):
            axis.plot(states.ends, values[:, rank], color=(0.2, 0.35 + share / 2, 0.75), linewidth=0.6)
        axis.set_yscale("log")
        ranks = axis.twinx()
        ranks.plot(states.ends, states.effective_ranks.mean(1), color="black", linewidth=1.4)
        ranks.set_ylim(bottom=0)
        ranks.set_ylabel("effective rank (black)", fontsize=7)
        ranks.tick_params(labelsize=6)
    return figure
