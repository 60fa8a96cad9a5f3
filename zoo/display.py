"""Tables, consoles and figures in the one style in which results are shown, also in notebooks."""

import base64
import html
import io
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from tqdm.auto import tqdm  # bars of a notebook, where there is one

from zoo.files.atomic import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOG_SECONDS = 30.0  # between the lines of a bar in a log file
SOON = 2  # seconds until a bar is worth showing
NOTEBOOK_WIDTH = 120  # columns of a table
STEADY = 0  # the time left follows from the mean speed, so that a pause between steps does not count as a slow step
_TABLE = (
    "<pre style=\"white-space: pre; overflow-x: auto; line-height: 1.2; font-family: Menlo, 'DejaVu Sans Mono', "
    'monospace">{code}</pre>'
)


def screen_text(text: str) -> str:
    """Spell out the characters that terminals obey, such as those of colours; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def new_table(
    columns: Iterable[str], left: Collection[str] | int = 1, wrapped: Collection[str] = (), **style: Any
) -> Table:
    """Return a table without rows, with its title and caption on the left.

    Args:
        columns: The headings.
        left: Columns that are aligned to the left, by name, or how many from the first; the others to the right.
        wrapped: Columns that wrap in a narrow terminal; the others are never broken.
        style: Further arguments of rich's Table.
    """
    defaults: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1)}
    table = Table(title_justify="left", caption_justify="left", **defaults | style)
    for number, column in enumerate(columns):
        is_left = number < left if isinstance(left, int) else column in left
        overflow = {"overflow": "fold"} if column in wrapped else {"no_wrap": True}
        table.add_column(column, justify="left" if is_left else "right", **overflow)
    return table


def new_console(verbose: bool = True, width: int = 120) -> Console:
    """Return a console that is at least `width` columns wide in a log file, and silent unless `verbose`."""
    console = Console(quiet=not verbose)
    return console if console.is_terminal else Console(quiet=not verbose, width=max(console.width, width))


class _Lines:
    """A text stream for tqdm that shows a bar as one line per interval, and a last one when it is closed."""

    def __init__(self, stream: TextIO):
        self._stream, self.encoding = stream, stream.encoding
        self._line = self._written = ""
        self._due = 0.0

    def write(self, text: str) -> None:
        self._line = text.strip() or self._line
        closed, now = text == "\n", time.monotonic()
        if self._line != self._written and (closed or now >= self._due):
            self._stream.write(f"{self._line}\n")
            self._written, self._due = self._line, now + LOG_SECONDS

    def flush(self) -> None:
        self._stream.flush()


def bar_settings() -> dict[str, Any]:
    """Return tqdm's arguments for a bar on a terminal, or for a line per interval where stderr is not a terminal."""
    if "ipykernel" in sys.modules:  # a notebook has other bars, and its stderr is not a terminal
        return {}
    if sys.stderr.isatty():
        # no percentage and no rate, which leaves room for the bar next to what is said about it
        form = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
        return {"file": sys.stderr, "dynamic_ncols": True, "bar_format": form, "smoothing": STEADY}
    form = "{desc}: {n_fmt}/{total_fmt}{unit}, {elapsed} passed, {remaining} left{postfix}"
    return {"file": _Lines(sys.stderr), "bar_format": form, "smoothing": STEADY}


def progress_bar(iterable: Iterable[Any] | None = None, **settings: Any) -> "tqdm[Any]":
    """Return tqdm's bar over an iterable; `settings` are further arguments of tqdm."""
    return _Bar(iterable, **bar_settings() | settings)


class _Bar(tqdm):
    """A bar that does not guess the time left before a hundredth is done: what comes first is often slow."""

    @property
    def format_dict(self) -> dict[str, Any]:
        numbers = dict(super().format_dict)
        if numbers["total"] and numbers["n"] - numbers["initial"] < numbers["total"] / 100:
            numbers["rate"] = 0.0  # which tqdm shows as an unknown time
        return numbers


def new_figure(width: float, height: float, dpi: int = 110) -> "Figure":
    """Return a figure without panels, in inches, made without pyplot, which needs global state and a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: "Figure", file: Path) -> None:
    """Write a figure in the format of the file's suffix."""
    with atomic_write(file) as opened:
        figure.savefig(opened, format=file.suffix.removeprefix("."))


def short_list(items: Iterable[str], most: int = 5, separator: str = "; ") -> str:
    """Return the first items in a line, and how many more there are."""
    items = list(items)
    return separator.join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def as_html(table: RenderableType | None, picture: Path) -> str:
    """Return a table and a PNG, as far as they exist, as HTML that needs no other file."""
    parts = []
    if table is not None:
        console = Console(file=io.StringIO(), width=NOTEBOOK_WIDTH, record=True, force_jupyter=False)
        console.print(table)
        parts.append(console.export_html(inline_styles=True, code_format=_TABLE))
    if picture.is_file():
        data = base64.b64encode(picture.read_bytes()).decode()
        name = html.escape(picture.stem.replace("_", " "))
        parts.append(f'<img alt="{name}" style="max-width: 100%" src="data:image/png;base64,{data}">')
    return "\n".join(parts)
