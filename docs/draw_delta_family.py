"""Draw the picture of docs/delta_family.md: `python docs/draw_delta_family.py` writes it to tutorials/pictures."""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

import kernels

COLUMNS = ("before", "decayed", "erased", "written", "after")
KEYS = torch.eye(3).repeat_interleave(2, 1) / 2**0.5  # three keys of length one in six channels
# what the state holds for them, and what a token brings for the first and the second
VALUES = torch.tensor([[1.0, 1, 0, 0, -1, -1], [1, -1, 1, -1, 1, -1], [1, 1, 1, 1, 1, 1]])
NEW = torch.tensor([[-1.0, 0, 1, 1, 0, -1], [-1, -1, 0, 0, 1, 1]])


class Token(NamedTuple):
    """What a mixer passes for one token: n steps of keys, values and erase keys, and the decays of the channels."""

    title: str
    k: Tensor
    v: Tensor
    erase: Tensor
    decay: Tensor
    read_before: bool = False


ONE, HALF = torch.ones(6), torch.full((6,), 0.5)
FIRST, CHANNELS = KEYS[:1], torch.tensor([1.0, 1, 1, 1, 0.2, 0.2])
TOKENS = (
    Token("DeltaNet\na = β k", FIRST, NEW[:1], FIRST, ONE),
    Token("Gated DeltaNet\none decay per head", FIRST, NEW[:1], FIRST, HALF),
    Token("KDA\na decay per channel", FIRST, NEW[:1], FIRST, CHANNELS),
    Token(
        "Gated DeltaNet-2\na = b ⊙ k, w ⊙ v",
        *(FIRST, NEW[:1] * torch.tensor([1.0, 1, 1, 0, 0, 0])),
        *(FIRST * torch.tensor([1.0, 0, 1, 1, 1, 1]), CHANNELS),
    ),
    Token("Comba\na = β p, read before", FIRST, NEW[:1], 0.73 * FIRST, HALF, True),
    Token("Gated DeltaProduct\ntwo steps", KEYS[:2], NEW, KEYS[:2], HALF),
)


def states(token: Token) -> list[Tensor]:
    """The matrices of `COLUMNS`, [channels,values]; the last one is that of `kernels.delta_rule`."""
    before = KEYS.T @ VALUES
    decayed = token.decay[:, None] * before
    k, v, a = (x[None, :, None] for x in (token.k, token.v, token.erase))
    q, log_decay = torch.zeros(1, 1, 1, 6), token.decay.log()[None, None, None]
    options = dict(read_before=token.read_before, steps=len(token.k), initial_state=before[None, None])
    _, after = kernels.delta_rule(q, k, v, None, log_decay, erase=a, **options, return_state=True)
    assert after is not None
    written = token.k.T @ token.v
    return [before, decayed, decayed + written - after[0, 0], written, after[0, 0]]


def picture() -> Figure:
    """A row for each mixer: its state before and after a token, and what happens in between."""
    figure = Figure(figsize=(8.2, 8.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(TOKENS), len(COLUMNS), squeeze=False)
    for row, token in enumerate(TOKENS):
        for column, matrix in enumerate(states(token)):
            here = axes[row, column]
            shown = here.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1)
            here.set_xticks([])
            here.set_yticks([])
            if not row:
                here.set_title(COLUMNS[column], fontsize=11)
        label = {"rotation": 0, "ha": "right", "va": "center", "fontsize": 9.5, "labelpad": 8}
        axes[row, 0].set_ylabel(token.title, **label)
    figure.colorbar(shown, ax=axes, shrink=0.35, aspect=30, location="bottom", ticks=[-1, 0, 1])
    return figure


def draw(folder: Path) -> None:
    """Write the picture."""
    with (folder / "delta_family.png").open("wb") as file:
        picture().savefig(file, format="png")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "tutorials" / "pictures")
