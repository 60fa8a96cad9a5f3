"""Draw README's picture from its rows: `python docs/draw_compare.py` writes tutorials/pictures/compare.png."""

import csv
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "reproductions" / "measured" / "compare_cpu.csv"
HYBRIDS, ATTENTION = {"gdn_h1", "gdn_h2", "samba"}, {"transformer", "swa"}
GAP = 0.105  # nats between two labels


def draw(folder: Path) -> Path:
    """Draw validation loss over tokens, a line for each config, and return the file."""
    with ROWS.open(encoding="utf-8", newline="") as stream:
        rows = sorted(csv.DictReader(stream), key=lambda row: float(row["val_loss"]))
    figure = Figure(figsize=(9, 5.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="thousand tokens", ylabel="validation loss (nats per token)", xlim=(95, 640))
    height = -float("inf")
    for row in rows:
        name, hybrid, attention = row["name"], row["name"] in HYBRIDS, row["name"] in ATTENTION
        color = "#c2410c" if hybrid else "#6b7280" if attention else "#2563a8"
        tokens = [float(word) / 1000 for word in row["val_tokens"].split()]
        losses = [float(word) for word in row["val_losses"].split()]
        axes.plot(tokens, losses, color=color, linestyle="--" if attention else "-", linewidth=2 if hybrid else 1.3)
        height = max(losses[-1], height + GAP)
        axes.plot([tokens[-1], 522], [losses[-1], height], color=color, linewidth=0.6)
        axes.text(525, height, f"{losses[-1]:.2f}  {name}", color=color, va="center", fontsize=9)
    bigram = float(rows[0]["bigram_loss"])
    axes.axhline(bigram, xmax=(512 - 95) / (640 - 95), color="black", linewidth=0.8, linestyle=":")
    axes.text(100, bigram - 0.03, f"bigram model {bigram:.2f}", va="top", fontsize=9)
    for color, kind in (("#c2410c", "hybrids"), ("#2563a8", "recurrent mixers"), ("#6b7280", "softmax attention")):
        axes.plot([], [], color=color, linestyle="--" if kind.startswith("softmax") else "-", label=kind)
    axes.legend(loc="upper right", bbox_to_anchor=(0.76, 1), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks([100, 200, 300, 400, 500])
    figure.savefig(folder / "compare.png")
    Image.open(folder / "compare.png").quantize(64).save(folder / "compare.png", optimize=True)  # a third of the bytes
    return folder / "compare.png"


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "tutorials" / "pictures")
