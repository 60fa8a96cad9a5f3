"""How Sphinx builds the documentation; CONTRIBUTING has the command."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

project = "token-mixer-zoo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]

# The source folder is the repository: a link that works here also works where the files are looked at. README is not
# on the site, whose landing page and quickstart say the same.
root_doc = "docs/index"
include_patterns = ["CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "dev/*.md", "tutorials/*.md", "tutorials/*.ipynb"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
source_suffix = {".md": "markdown", ".ipynb": "markdown"}
html_math_renderer = "mathml"  # which browsers render without a script
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # text is what a command printed

html_theme = "furo"
html_title = "The token-mixer zoo"
html_copy_source = False
html_show_sphinx = False
html_extra_path = ["html"]  # index.html, which leads to the landing page
html_static_path = ["static"]
html_css_files = ["site.css"]
project_table = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# the footer links to the repository once pyproject.toml has its address under [project.urls]
html_theme_options = {
    "footer_icons": [
        {"name": name, "url": url, "html": name, "class": ""} for name, url in project_table.get("urls", {}).items()
    ]
}

default_role = "literal"  # docstrings have names in single backticks
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # nn.Module's say nothing of ours
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80

nitpicky = True
# Types of other packages are not looked up: that would need a network. All of ours have to be in the reference.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|lightning|jsonargparse|numpy|tokenizers|fsspec|rich|matplotlib)\..*"),
    ("py:.*", r"(collections|contextlib|pathlib)\..*"),
    ("py:class", r"mixers\.(registry\.M|context_parallel\.(Outputs|Gathered))"),  # type variables
    ("py:class", r".*Annotated.*"),  # mixers.History and Position, which Sphinx spells out
]


def as_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """The bars of |z| are no markup."""
    lines[:] = [re.sub(r"(`[^`]*`)|\|", lambda found: found[1] or r"\|", line) for line in lines]


def notebook(app: Any, name: str, source: list[str]) -> None:
    """A notebook is read as Markdown; its outputs are not stored."""
    if str(app.env.doc2path(name)).endswith(".ipynb"):
        texts = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(source[0])["cells"]]
        source[0] = "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts)


def formula(writer: Any, node: Any) -> None:
    """Write a formula as MathML, an indented one as a paragraph."""
    display = "block" if node.tagname == "math_block" else "inline"
    mathml = convert(node.astext(), display=display)
    writer.body.append(f'<p class="formula">{mathml}</p>' if display == "block" else mathml)
    raise SkipNode


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", inline_renderers=(formula, None), block_renderers=(formula, None))
    app.connect("source-read", notebook)
    app.connect("autodoc-process-docstring", as_text)
