"""Results as HTML, for notebooks."""

import base64
import html
import io
from pathlib import Path

from rich.console import Console, RenderableType

WIDTH = 120  # columns of a table
_TABLE = (
    "<pre style=\"white-space: pre; overflow-x: auto; line-height: 1.2; font-family: Menlo, 'DejaVu Sans Mono', "
    'monospace">{code}</pre>'
)


def as_html(table: RenderableType | None, picture: Path) -> str:
    """Return a table and a PNG, as far as they exist, as HTML that needs no other file."""
    parts = []
    if table is not None:
        console = Console(file=io.StringIO(), width=WIDTH, record=True, force_jupyter=False)
        console.print(table)
        parts.append(console.export_html(inline_styles=True, code_format=_TABLE))
    if picture.is_file():
        data = base64.b64encode(picture.read_bytes()).decode()
        name = html.escape(picture.stem.replace("_", " "))
        parts.append(f'<img alt="{name}" style="max-width: 100%" src="data:image/png;base64,{data}">')
    return "\n".join(parts)
