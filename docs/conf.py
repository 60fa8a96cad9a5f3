"""How Sphinx builds the documentation; CONTRIBUTING has the command."""

import re
from typing import Any

project = "token-mixer-zoo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# The source folder is the repository: a link that works here also works where the files are looked at.
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "dev/*.md", "tutorials/*.md"]
myst_heading_anchors = 3
suppress_warnings = ["toc.not_included"]

default_role = "literal"  # docstrings have names in single backticks
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # nn.Module's say nothing of ours
autodoc_typehints_format = "short"

nitpicky = True
# Types of other packages are not looked up: that would need a network. All of ours have to be in the reference.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|lightning|jsonargparse|numpy|tokenizers|fsspec|collections|contextlib|pathlib)\..*"),
    ("py:class", r"mixers\.registry\.M"),  # a type variable
    ("py:class", r".*Annotated.*"),  # mixers.History and Position, which Sphinx spells out
]


def as_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """The bars of |z| are no markup."""
    lines[:] = [re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or r"\|", line) for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", as_text)
