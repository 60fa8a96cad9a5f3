"""A figure of scaling laws, after Figure 1 of arXiv 2406.16690: L(C), N_opt(C) and D_opt(C) of each mixer, and of all.

    python reproductions/scaling_figure.py runs/miniature --method=parametric --output=scaling_miniature.png

Plain arguments and options are those of `python cli.py scaling fit`, which writes the laws; they are fitted anew here.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from kernels import UserError
from zoo.config.command_line import arguments_of
from zoo.display import new_console, new_figure, write_figure
from zoo.evaluation.results import COLOURS, MARKERS
from zoo.scaling.fit import Counting, fitted
from zoo.scaling.law import Law, span
from zoo.scaling.optima import Laws, Method


def draw(
    runs: list[str],
    method: Method = "envelope",
    output: str = "laws.png",
    flops: Counting = "model",
    draws: int = 200,
    seed: int = 0,
) -> Path:
    """Fit laws to runs and draw them.

    Args:
        runs, method, flops, draws, seed: As for `scaling fit`.
        output: The file of the figure, which is replaced; its suffix is the format, such as .png or .svg.

    Returns:
        The file.

    Raises:
        UserError: As for `scaling fit`.
    """
    laws, *_ = fitted(runs, method, flops=flops, draws=draws, seed=seed, console=new_console())
    write_figure(picture(laws), Path(output))
    return Path(output)


def picture(laws: Sequence[Law]) -> Figure:
    """Curves, optima and laws, after Figure 1 of arXiv 2406.16690."""
    drawn = new_figure(12, 3.3 * (len(laws) + (len(laws) > 1)), dpi=150)
    panels = drawn.subplots(len(laws) + (len(laws) > 1), 3, squeeze=False, sharex=True, sharey="col")
    if len(laws) > 1:
        for panel, part in zip(panels[0], Laws._fields, strict=True):
            for index, law in enumerate(laws):
                _line(panel, law, part, COLOURS[index % len(COLOURS)], law.mixer)
            panel.legend(fontsize="x-small", frameon=False)
        panels[0][0].set_title("all")
    for index, law in enumerate(laws):
        colour = COLOURS[index % len(COLOURS)]
        row = panels[index + (len(laws) > 1)]
        for curve in law.curves:
            row[0].plot(curve.flops, curve.losses, "." if len(curve.losses) == 1 else "-", color="0.7", linewidth=0.8)
        for panel, part in zip(row, Laws._fields, strict=True):
            if law.optima is not None:
                points = {"loss": law.optima.losses, "size": law.optima.sizes, "tokens": law.optima.tokens}[part]
                every, marker = max(1, len(points) // 60), MARKERS[index % len(MARKERS)]
                panel.plot(law.optima.flops[::every], points[::every], marker, color=colour, markersize=3, alpha=0.5)
            _line(panel, law, part, colour, None)
        row[0].set_title(law.mixer)
    names = {"loss": "loss (nats per token)", "size": "best size (without embeddings)", "tokens": "best tokens"}
    for row in panels:
        for panel, part in zip(row, Laws._fields, strict=True):
            panel.set(xscale="log", yscale="log", ylabel=names[part])
            panel.grid(alpha=0.3)
        row[0].yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        for axis_ticks in (row[0].yaxis.set_major_formatter, row[0].yaxis.set_minor_formatter):
            axis_ticks("{x:g}")
    for panel in panels[-1]:
        panel.set_xlabel("compute (FLOPs)")
    return drawn


def _line(panel: Axes, law: Law, part: str, colour: str, label: str | None) -> None:
    at = np.geomspace(*span([law]), 100)
    panel.plot(at, getattr(law.laws, part)(at), color=colour, label=label)
    if len(law.draws) >= law.failed_draws and law.draws:
        low, high = np.percentile([getattr(drawn, part)(at) for drawn in law.draws], [2.5, 97.5], axis=0)
        panel.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)


if __name__ == "__main__":
    try:
        options = arguments_of(draw, sys.argv[1:], "scaling_figure", positional="runs")[1]
        sys.stdout.write(f"written to {draw(**options)}\n")
    except UserError as error:
        sys.exit(f"error: {error.on_command_line}")
