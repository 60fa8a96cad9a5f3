"""Pictures of what layers remember: matrices over pairs of tokens, retention, spectra."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import SymLogNorm
from matplotlib.figure import Figure

from zoo.display import new_figure

from .layer import Layer

MOST_COLUMNS = 4
MOST_LABELS = 64  # tokens whose text is written at the axes
QUANTILES = (0.1, 0.5, 0.9)


def panels(count: int, size: float) -> tuple[Figure, list[Axes]]:
    """A figure with a grid of so many panels, each `size` inches wide and high."""
    columns = min(count, MOST_COLUMNS)
    rows = -(-count // columns)
    figure = new_figure(size * columns + 0.8, size * rows + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axis in axes[count:]:
        axis.axis("off")
    return figure, axes[:count]


def heads_of(layers: Sequence[Layer]) -> list[tuple[Layer, int]]:
    """All heads of a layer, or the first head of each of several."""
    return [(layer, head) for layer in layers for head in range(layer.heads if len(layers) == 1 else 1)]


def attention(layers: Sequence[Layer], tokens: Sequence[str]) -> Figure | None:
    """A heat map of A for each head, with tokens as labels where they are few; signed, on a scale of logarithms."""
    chosen = heads_of(layers)
    if not chosen:
        return None
    labelled = len(tokens) <= MOST_LABELS
    figure, axes = panels(len(chosen), max(2.6, 0.13 * len(tokens)) if labelled else 3.2)
    for axis, (layer, head) in zip(axes, chosen, strict=True):
        matrix = layer.attention(head)
        largest = max(float(matrix.abs().max()), 1e-12)
        norm = SymLogNorm(largest / 100, vmin=-largest, vmax=largest)
        image = axis.imshow(matrix, cmap="RdBu", norm=norm, aspect="auto", interpolation="nearest")
        axis.set_title(f"layer {layer.number}, head {head}: {layer.name}", fontsize=8)
        axis.set_xlabel("write" if layer.steps > 1 else "written", fontsize=7)
        axis.set_ylabel("read", fontsize=7)
        bar = figure.colorbar(image, ax=axis, ticks=[-largest, 0, largest], fraction=0.05, format="{x:.2g}")
        bar.ax.tick_params(labelsize=6)
        if not labelled:
            axis.tick_params(labelsize=6)
            continue
        shown = [_label(token) for token in tokens]
        axis.set_yticks(range(len(tokens)), shown, fontsize=5)
        n = layer.steps
        late = ["", *shown[:-1]] if layer.write_delay else shown
        axis.set_xticks([n * i for i in range(len(tokens))], late, fontsize=5, rotation=90)
    return figure


def _label(token: str) -> str:
    shown = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣").replace("$", r"\$")
    return "".join(c if c.isprintable() else "�" for c in shown)[:10]


def retention(layers: Sequence[Layer]) -> Figure | None:
    """Median share of a write that is left, and that decays and later writes took, over the tokens since."""
    chosen = [pair for pair in heads_of(layers) if pair[0].has_state]
    if not chosen:
        return None
    figure, axes = panels(len(chosen), 2.6)
    for axis, (layer, head) in zip(axes, chosen, strict=True):
        found = layer.retention(head)
        n = layer.steps
        for name, x, colour in (
            ("left", found.left, "C0"),
            ("decayed", found.decayed, "C1"),
            ("erased", found.erased, "C3"),
        ):
            low, middle, high = _by_distance(x[:, n - 1 :: n].numpy())
            axis.plot(middle, color=colour, label=name, linewidth=1.2)
            axis.fill_between(range(len(middle)), low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_title(f"layer {layer.number}, head {head}: {layer.name}", fontsize=8)
        axis.set_xlabel("tokens since the write", fontsize=7)
        axis.tick_params(labelsize=6)
        axis.set_ylim(-0.3, 1.3)
    axes[0].legend(fontsize=6, frameon=False)
    axes[0].set_ylabel("share (median, 10 to 90 %)", fontsize=7)
    return figure


def _by_distance(x: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> list[list[float]]:
    """Quantiles over the writes of x [T,T] by distance; distances of few writes are left out."""
    least = min(8, max(1, len(x) // 4))
    diagonals = [np.diagonal(x, -distance) for distance in range(len(x) - least + 1)]
    kept = [values[~np.isnan(values)] for values in diagonals]
    return [[float(np.quantile(values, q)) if len(values) else float("nan") for values in kept] for q in QUANTILES]


def spectra(layers: Sequence[Layer], every: int) -> Figure | None:
    """Singular values of the states over the text, and their effective rank; medians over heads."""
    chosen = [layer for layer in layers if layer.has_state]
    if not chosen:
        return None
    figure, axes = panels(len(chosen), 2.8)
    for axis, layer in zip(axes, chosen, strict=True):
        found = layer.spectra(every)
        values = found.values.median(1).values
        colours = torch.linspace(0.15, 0.9, values.shape[1]).tolist()
        for rank, share in enumerate(colours):
            colour = (0.2, 0.35 + share / 2, 0.75)
            axis.plot(found.ends, values[:, rank].clamp(min=1e-8), color=colour, linewidth=0.6)
        axis.set_yscale("log")
        axis.set_title(f"layer {layer.number}: {layer.name}", fontsize=8)
        axis.set_xlabel("tokens", fontsize=7)
        axis.tick_params(labelsize=6)
        ranks = axis.twinx()
        ranks.plot(found.ends, found.effective_ranks.mean(1), color="black", linewidth=1.4)
        ranks.set_ylim(0, values.shape[1])
        ranks.set_ylabel("effective rank (black)", fontsize=7)
        ranks.tick_params(labelsize=6)
    axes[0].set_ylabel("singular values (blue)", fontsize=7)
    return figure
