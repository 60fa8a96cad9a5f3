"""Draw training speed over the size of models: `python docs/draw_cost_over_size.py` writes it to tutorials/pictures.

A second argument names other rows of `reproductions/cost_over_size.py`.
"""

import csv
import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter
from PIL import Image

from zoo.display import new_figure

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "reproductions" / "measured" / "cost_over_size_h100.csv"
NAMES = {
    "gated_deltanet": "Gated DeltaNet",
    "gla": "GLA",
    "mamba2": "Mamba2",
    "h2": "H2",
    "attention": "Transformer++",
    "fla": "Gated DeltaNet of flash-linear-attention",
    "llama": "Llama of transformers",
}
COLORS = {"fla": "C0", "llama": "C4"}  # those of the same mixers here
MARKERS = {"fla": "X", "llama": "P"}
UNITS = {"M": 1e6, "B": 1e9}
Rows = list[dict[str, str]]


def read(file: Path) -> Rows:
    """Return the rows with a speed."""
    with file.open(encoding="utf-8", newline="") as stream:
        return [row for row in csv.DictReader(stream) if row["tokens_per_second"]]


def figure(rows: Rows) -> Figure:
    """A column for each number of tokens in a step: tokens per second, and the use of the GPU if it is known."""
    tokens = sorted({int(row["tokens"]) for row in rows})
    sizes = {row["size"]: float(row["size"][:-1]) * UNITS[row["size"][-1]] for row in rows}
    panels = {"tokens_per_second": "tokens/s"}
    panels |= {"mfu": "MFU"} if any(row["mfu"] for row in rows) else {}
    picture = new_figure(3.4 * len(tokens) + 0.6, 3.1 * len(panels) + 1)
    axes = picture.subplots(len(panels), len(tokens), squeeze=False, sharex=True, sharey="row")
    for column, number in enumerate(tokens):
        axes[0, column].set_title(f"{number:,} tokens in a step", fontsize=10)
        axes[-1, column].set_xlabel("parameters")
        for row, (key, label) in enumerate(panels.items()):
            here = axes[row, column]
            here.set_xscale("log")
            if key == "tokens_per_second":
                here.set_yscale("log")
            if not column:
                here.set_ylabel(label)
            here.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0) if key == "mfu" else EngFormatter(sep=""))
            here.set_xticks([*sizes.values()], [*sizes], fontsize="small")
            here.minorticks_off()
            here.grid(alpha=0.3)
            for place, model in enumerate(NAMES):
                for mode, style in (("captured", "-"), ("eager", "--")):
                    line = [
                        (float(each["parameters"]), float(each[key]))
                        for each in rows
                        if (each["model"], each["mode"], int(each["tokens"])) == (model, mode, number) and each[key]
                    ]
                    if line:
                        look = {"color": COLORS.get(model, f"C{place}"), "markersize": 8 if model in MARKERS else 3}
                        form = "none" if model in MARKERS else style
                        here.plot(
                            *zip(*sorted(line), strict=True), linestyle=form, marker=MARKERS.get(model, "o"), **look
                        )
    measured = {row["model"] for row in rows}
    for place, (model, name) in enumerate(NAMES.items()):
        if model in measured:
            look = {"color": COLORS.get(model, f"C{place}"), "marker": MARKERS.get(model, ""), "label": name}
            axes[0, 0].plot([], [], linestyle="none" if model in MARKERS else "-", **look)
    for mode, style in (("captured", "-"), ("eager", "--")):
        axes[0, 0].plot([], [], color="gray", linestyle=style, label=mode)
    picture.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    picture.suptitle(f"Training on one {rows[0]['device']}, {rows[0]['precision']}", fontsize=10)
    return picture


def draw(folder: Path, file: Path = ROWS) -> Path:
    """Write the picture, and return its file."""
    target = folder / "cost_over_size.png"
    figure(read(file)).savefig(target)
    Image.open(target).quantize(64).save(target, optimize=True)
    return target


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "tutorials" / "pictures", *map(Path, sys.argv[2:]))
