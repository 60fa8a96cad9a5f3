"""Descriptions of mixers for the terminal: a table of all of them, and a page about one."""

import inspect
from typing import NamedTuple

from docstring_parser import parse
from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

import mixers
from mixers import Expanded, LinearMixer, MixerFactory, Site
from mixers.arguments import check_sizes
from zoo.display import new_table
from zoo.lm.creation import created_on


class Measures(NamedTuple):
    """Sizes of one layer.

    Attributes:
        parameters: Number of parameters.
        state: Numbers in the state of one sequence after `length` tokens.
        grows: Whether the state grows with the sequence.
        mflops: Millions of floating-point operations a token, for `length` tokens.
    """

    parameters: int
    state: int
    grows: bool
    mflops: float


def measures(mixer: MixerFactory, site: Site, length: int) -> Measures:
    """Return the sizes of a layer at `site` for sequences of `length` tokens."""
    with created_on("meta"):
        built = mixer(site)
    parameters = sum(parameter.numel() for parameter in built.parameters())
    flops = built.flops(length) / length / 1e6
    return Measures(parameters, int(built.state_size(length)), not built.constant_state, flops)


def mixers_table(site: Site, length: int) -> Table:
    """A table of the registered mixers, with the sizes of a layer at `site` for sequences of `length` tokens."""
    caption = f"one layer at hidden size {site.hidden_size}, {site.num_heads} heads, {length} tokens"
    columns = ("mixer", "parameters", "state", "MFLOP/token")
    table = new_table(columns, wrapped=["mixer"], box=box.HEAVY_HEAD, caption=caption, show_lines=True)
    for name in mixers.names():
        entry = mixers.entry(name)
        about = f"[bold]{name}[/bold]\n{escape(entry.recurrence)}\n[dim]{escape(entry.paper)}[/dim]"
        table.add_row(about, *_cells(measures(entry.mixer, site, length)))
    return table


def page(name: str, site: Site, length: int) -> Group:
    """A page about one mixer: recurrence, source, arguments, and its sizes with and without an expanded state."""
    mixer = mixers.get(name)
    docstring = parse(inspect.getdoc(mixer) or "")
    meanings = {argument.arg_name: argument.description or "" for argument in docstring.params}
    arguments = Table(title="arguments", title_justify="left")
    for column in ("name", "default", "meaning"):
        arguments.add_column(column, overflow="fold")
    for parameter in inspect.signature(mixer).parameters.values():
        if parameter.name != "site":
            default = parameter.default
            shown = default.__name__ if isinstance(default, type) else repr(default)
            meaning = " ".join(meanings.get(parameter.name, "").split())
            arguments.add_row(parameter.name, escape(shown), escape(meaning))
    title = f"one layer at hidden size {site.hidden_size}, {site.num_heads} heads, {length} tokens"
    sizes = new_table(("layer", "parameters", "state", "MFLOP/token"), box=box.HEAVY_HEAD, title=title)
    sizes.add_row("not expanded", *_cells(measures(mixer, site, length)))
    if issubclass(mixer, LinearMixer):
        for factor in (2, 4, 8):
            expanded = Expanded(mixer=mixer, factor=factor)
            sizes.add_row(f"Expanded, factor {factor}", *_cells(measures(expanded, site, length)))
    description = "\n\n".join(filter(None, (docstring.short_description, docstring.long_description)))
    paragraphs = (" ".join(paragraph.split()) for paragraph in description.split("\n\n"))  # a terminal wraps them anew
    shown = name if name in mixers.names() else f"{mixer.__module__}.{mixer.__name__}"
    snippet = f"in a config\n  model: {{stack: {{class_path: Uniform, init_args: {{mixer: {shown}}}}}}}\n"
    return Group(Text(name, style="bold"), Text("\n\n".join(paragraphs) + "\n"), arguments, sizes, Text(snippet))


def _cells(sizes: Measures) -> tuple[str, str, str]:
    state = f"{sizes.state:,}" + ("\ngrows" if sizes.grows else "")
    return f"{sizes.parameters:,}", state, f"{sizes.mflops:.1f}"


def show_mixers(name: str | None = None, hidden_size: int = 1024, num_heads: int = 8, length: int = 4096) -> None:
    """List the token mixers with their sizes, or describe one of them.

    Args:
        name: The mixer to describe; by default all are listed.
        hidden_size: Size of the residual stream.
        num_heads: Number of heads.
        length: Tokens in a sequence, for FLOPs and growing states.

    Raises:
        UserError: A mixer of the name does not exist, or a size is below 1 or does not fit.
    """
    check_sizes({"hidden_size": hidden_size, "num_heads": num_heads, "length": length})
    site = mixers.Site(hidden_size, num_heads)
    Console().print(mixers_table(site, length) if name is None else page(name, site, length))
