"""How Sphinx builds the documentation; CONTRIBUTING has the command."""

import re
from typing import Any

project = "token-mixer-zoo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_design"]

# The source folder is the repository: a link that works here also works where the files are looked at. README is not
# on the site, whose landing page and quickstart say the same.
root_doc = "docs/index"
include_patterns = ["CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "dev/*.md", "tutorials/*.md"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = "The token-mixer zoo"
html_copy_source = False
html_show_sphinx = False
html_extra_path = ["html"]  # index.html, which leads to the landing page
html_static_path = ["static"]
html_css_files = ["site.css"]

default_role = "literal"  # docstrings have names in single backticks
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # nn.Module's say nothing of ours
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80

nitpicky = True
# Types of other packages are not looked up: that would need a network. All of ours have to be in the reference.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|lightning|jsonargparse|numpy|tokenizers|fsspec|collections|contextlib|pathlib)\..*"),
    ("py:class", r"mixers\.(registry\.M|context_parallel\.(Outputs|Gathered))"),  # type variables
    ("py:class", r".*Annotated.*"),  # mixers.History and Position, which Sphinx spells out
]


def as_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """The bars of |z| are no markup."""
    lines[:] = [re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or r"\|", line) for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", as_text)
