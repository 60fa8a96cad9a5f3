"""Draw the pictures of docs/kernels.md: `python docs/draw_passes.py` writes them to tutorials/pictures."""

import sys
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

CHUNKS, FORTH, BACK = "over chunks", "along time", "along time, from the end"
COLORS = {CHUNKS: "#dbe7f5", FORTH: "#d9eedb", BACK: "#f8e3cf"}
WIDTH, HEIGHT, STEP, ROW = 2.6, 0.62, 3.75, 2.05
NOT_KEPT = "where these were not kept"


class Kernel(NamedTuple):
    """A launch: its name, how its programs run, what it reads of the op's tensors, its results, what it hands on."""

    name: str
    runs: str
    reads: str
    writes: str = ""
    passes: str = ""
    note: str = ""


ROWS = dict[str, list[Kernel]]
GATES = Kernel("head_gates", CHUNKS, "g", passes="b, e^b, …")
SCORES = Kernel("head_scores", CHUNKS, "q k v dO g", passes="P, dP,\ngates")
PREPARE = Kernel("prepare", CHUNKS, "q k β g", passes="inverse,\nscores,\ngates")
AGAIN = Kernel("scan_forward", FORTH, "k v", passes="U, states", note=NOT_KEPT)
FAMILIES: dict[str, ROWS] = {
    "head": {
        "forward": [GATES, Kernel("output_pass", FORTH, "q k v", "o, state")],
        "backward, Hopper": [
            GATES,
            Kernel("states", FORTH, "k v", passes="states"),
            Kernel("gradients", BACK, "q k v dO", "dq dk dv dg"),
        ],
        "backward elsewhere": [
            SCORES,
            Kernel("output_pass", BACK, "q k dO", "dv"),
            Kernel("output_pass", FORTH, "q k v dO", "dq", "check-\npoints"),
            Kernel("output_pass", BACK, "q k v dO", "dk", "anchors"),
            Kernel("head_gate_grads", CHUNKS, "", "dg"),
        ],
    },
    "channel": {
        "forward, Hopper": [
            Kernel("outputs", FORTH, "q k v g", "o, state", "sums of g"),
        ],
        "backward, Hopper": [
            Kernel("states", FORTH, "k v g", passes="states,\nsums of g", note=NOT_KEPT),
            Kernel("gradients", BACK, "q k v g dO", "dq dk dv dg"),
        ],
        "forward elsewhere": [
            Kernel("channel_scores", CHUNKS, "q k g", passes="scores,\ndecayed\nq and k"),
            Kernel("output_pass", FORTH, "v", "o, state"),
        ],
        "backward elsewhere": [
            Kernel("channel_scores", CHUNKS, "q k g", passes="scores,\ndecayed\nq and k"),
            Kernel("output_pass", BACK, "dO", "dv"),
            Kernel("output_pass", FORTH, "v dO", passes="through\nthe state", note="twice: also from the end"),
            Kernel("channel_score_grads", CHUNKS, "v dO", passes="dP"),
            Kernel("channel_grads", CHUNKS, "q k g", "dq dk dg"),
        ],
    },
    "delta": {
        "forward": [PREPARE, Kernel("scan_forward", FORTH, "q k v", "o, state")],
        "backward, Hopper": [
            AGAIN,
            Kernel("gradients", BACK, "q k β dO", "dq dk dv dβ", "sums"),
            Kernel("gradient_of_log_decay", CHUNKS, "", "dg"),
        ],
        "backward elsewhere": [
            AGAIN,
            Kernel("scan_backward", BACK, "q k dO", "dv", "dS"),
            Kernel("gradient_of_queries", CHUNKS, "q k β dO", "dq dβ", "X, M,\nsums"),
            Kernel("gradient_of_keys", CHUNKS, "q k", "dk", "sums"),
            Kernel("gradient_of_log_decay", CHUNKS, "", "dg"),
        ],
    },
}


def draw_kernel(axes: Axes, kernel: Kernel, x: float, y: float) -> None:
    """A box with the kernel's name, what it reads above it, and its results below."""
    box = FancyBboxPatch((x, y), WIDTH, HEIGHT, boxstyle="round,pad=0.04", fc=COLORS[kernel.runs], ec="#555555")
    axes.add_patch(box)
    middle = x + WIDTH / 2
    axes.text(middle, y + HEIGHT / 2, kernel.name, ha="center", va="center", family="monospace", fontsize=9)
    if kernel.reads:
        axes.text(middle, y + HEIGHT + 0.14, f"{kernel.reads}  ↓", ha="center", va="bottom", fontsize=9)
    if kernel.writes:
        axes.text(middle, y - 0.14, f"↓  {kernel.writes}", ha="center", va="top", fontsize=9, weight="bold")
    if kernel.note:
        axes.text(middle, y - 0.14, kernel.note, ha="center", va="top", fontsize=8.5, style="italic")


def picture(rows: ROWS) -> Figure:
    """A row of boxes for each pass, in the order of their launches."""
    columns = max(map(len, rows.values()))
    width, height = columns * STEP, len(rows) * ROW + 0.35
    figure = Figure(figsize=(0.62 * width, 0.62 * height), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.3, width - 0.55), ylim=(-height + 0.1, 0.1))
    axes.set_axis_off()
    for number, (title, kernels) in enumerate(rows.items()):
        top = -number * ROW
        axes.text(-0.1, top, title, va="top", fontsize=10.5, weight="bold", color="#333333")
        for place, kernel in enumerate(kernels):
            x, y = place * STEP, top - 1.42
            draw_kernel(axes, kernel, x, y)
            if place + 1 < len(kernels):
                ends = {"xy": (x + STEP - 0.06, y + HEIGHT / 2), "xytext": (x + WIDTH + 0.06, y + HEIGHT / 2)}
                axes.annotate("", arrowprops={"arrowstyle": "-|>", "color": "#333333"}, **ends)
                label = {"ha": "center", "va": "bottom", "fontsize": 8, "color": "#333333"}
                axes.text(x + (WIDTH + STEP) / 2, y + HEIGHT / 2 + 0.06, kernel.passes, **label)
    used = {kernel.runs for kernels in rows.values() for kernel in kernels}
    legend = [Patch(fc=color, ec="#555555", label=runs) for runs, color in COLORS.items() if runs in used]
    axes.legend(handles=legend, loc="upper right", fontsize=8.5, frameon=False, ncols=len(legend))
    return figure


def draw(folder: Path) -> None:
    """Write one picture for each family."""
    for family, rows in FAMILIES.items():
        with (folder / f"passes_{family}.png").open("wb") as file:
            picture(rows).savefig(file, format="png")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "tutorials" / "pictures")
