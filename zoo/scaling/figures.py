"""Tables of laws and remarks on them for the terminal, and figures fit for a paper."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich.table import Table

from zoo.display import new_figure, new_table, write_figure
from zoo.evaluation.results import COLOURS, MARKERS
from zoo.scaling.curves import PF_DAY, sizes
from zoo.scaling.law import Crossing, Law, span
from zoo.scaling.optima import Laws
from zoo.scaling.power import PowerLaw

PICTURES = ("laws.png", "laws.svg")
FEW_SIZES = 8  # for an envelope


def table(laws: Sequence[Law]) -> Table:
    """Laws in the form of Table 3 of arXiv 2406.16690, with C in PF-days, exponents with their intervals."""
    columns = ("mixer", "L(C)", "N_opt(C)", "D_opt(C)", "runs", "a + b")
    shown = new_table(columns, wrapped=columns[1:])
    for law in laws:
        cells = [_cell(law, attrgetter(part)) for part in Laws._fields]
        shown.add_row(law.mixer, *cells, str(len(law.curves)), f"{law.laws.balance:.2f}")
    shown.caption = (
        "C in PF-days (8.64e19 FLOPs); N without embeddings; in brackets the middle 95 % of a bootstrap over runs"
    )
    return shown


def _cell(law: Law, part: Callable[[Laws], PowerLaw]) -> str:
    fitted = part(law.laws)
    coefficient = fitted.coefficient * PF_DAY**fitted.exponent
    start = f"{fitted.offset:.3f} + " if fitted.offset else ""
    interval = law.interval(lambda laws: part(laws).exponent)
    ends = "[?]" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{start}{coefficient:.4g} · C^{fitted.exponent:.4f}\n{ends}"


def crossing_table(crossings: Sequence[Crossing]) -> Table:
    """Table of crossings, one row a pair: the mixer that has the lower loss with less compute, and the one with more.

    Of two that do not cross, the better one is named in the first column, the other as `never …` in the second.
    """
    columns = ("better below", "better above", "FLOPs", "95 %", "loss", "draws that cross")
    shown = new_table(columns, left=2, wrapped=columns[2:])
    for pair in crossings:
        flops = "do not cross" if pair.flops is None else f"{pair.flops:.2g}"
        ends = "?" if pair.flops_interval is None else "{:.2g} to {:.2g}".format(*pair.flops_interval)
        loss = "" if pair.loss is None else f"{pair.loss:.3f}"
        crossed = "" if pair.crossed is None else f"{100 * pair.crossed:.0f} %"
        above = f"never {pair.mixers[1]}" if pair.flops is None else pair.mixers[1]
        shown.add_row(pair.mixers[0], above, flops, "" if pair.flops is None else ends, loss, crossed)
    low, high = crossings[0].between
    shown.caption = f"L(C) of both is equal there; looked for between {low:.2g} and {high:.2g} FLOPs"
    return shown


def remarks(laws: Sequence[Law]) -> list[str]:
    """Remarks on the laws for their readers: runs left out, offsets, balances."""
    lines = []
    for law in laws:
        if law.optima is not None and (reasons := {why: n for why, n in law.optima.left_out.items() if n}):
            number = len(law.optima.flops)
            listed = ", ".join(f"{count} since {why}" for why, count in reasons.items())
            lines.append(f"{law.mixer}: {number} amounts of compute have an optimum; without: {listed}")
        if law.offset is not None:
            power, with_offset = law.offset.errors
            better = "with an offset" if with_offset < power else "without an offset"
            lines.append(
                f"{law.mixer}: L(C) {better} predicts the largest best size better: {100 * power:.2f} % off without, "
                f"{100 * with_offset:.2f} % with ({law.offset.with_offset.offset:.3f})"
            )
        if abs(law.laws.balance - 1) > 0.1:
            lines.append(
                f"{law.mixer}: the exponents of N_opt and D_opt add up to {law.laws.balance:.2f}, so FLOPs per token "
                "do not grow as the size does"
            )
        if law.method == "envelope" and len(sizes(law.curves)) < FEW_SIZES:
            lines.append(
                f"{law.mixer}: an envelope of {len(sizes(law.curves))} sizes has steps that its intervals do not know "
                "of (without noise they shift exponents by 0.03 to 0.05); compare method=isoflop"
            )
        if law.failed_draws:
            lines.append(
                f"{law.mixer}: {law.failed_draws} of {law.failed_draws + len(law.draws)} draws could not be fitted"
            )
    return lines


def alike(crossings: Sequence[Crossing]) -> list[str]:
    """A sentence for each pair of mixers that the runs do not distinguish."""
    return [
        f"{' and '.join(pair.mixers)} cannot be told apart: at {pair.spent:.2g} FLOPs, the most that both have spent, "
        f"the loss of the second is higher by {pair.difference[0]:.3f} to {pair.difference[1]:.3f} nats"
        for pair in crossings
        if pair.difference is not None and pair.difference[0] <= 0 <= pair.difference[1]
    ]


def write_pictures(laws: Sequence[Law], folder: Path) -> list[Path]:
    """Write `laws.png` and `.svg`: L(C), N_opt(C) and D_opt(C) of all mixers together, and a row for each."""
    files = [folder / name for name in PICTURES]
    for file in files:
        write_figure(picture(laws), file)
    return files


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
