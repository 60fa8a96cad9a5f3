"""What documents refer to exists.

Their commands are in `test_documented_commands.py`, tutorials in `test_tutorials.py`, links in `test_site.py`.
"""

import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from .commands import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]  # what is true now
PACKAGES = "kernels|mixers|zoo"
FOLDERS = f"{PACKAGES}|configs|dev|docs|reproductions/measured|tests|tutorials"
WORDS = 1200  # about two pages
RENDERED = {"reproductions"}  # written by a program, as long as its data


def mentioned(page: Path, pattern: str) -> list[str]:
    """What a page names in backticks, outside of blocks of code; `my_…` is the reader's own."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [found for found in re.findall(pattern, prose) if "my_" not in found and "MY_" not in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path):
    for name in mentioned(page, rf"`((?:{PACKAGES})(?:\.\w+)+)"):
        assert pkgutil.resolve_name(name) is not None, name  # raises where there is no such thing
    for path in mentioned(page, rf"`((?:{FOLDERS})/[\w./-]+)`"):
        assert (ROOT / path).exists(), f"{page.name} names {path}, which does not exist"
    configs = {path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    configs |= {Path(name).name for name in configs}
    for name in mentioned(page, r"`([\w.-]+(?:/[\w.-]+)?\.yaml)`"):
        assert name in configs or name == "config.yaml", f"{page.name} names {name}, which is no config"


@pytest.mark.parametrize("page", [page for page in PAGES[2:] if page.stem not in RENDERED], ids=lambda page: page.stem)
def test_a_topic_has_two_pages_at_most(page: Path):
    assert len(page.read_text(encoding="utf-8").split()) <= WORDS


@pytest.mark.slow
def test_the_pictures_of_the_passes_show_what_there_is(tmp_path: Path):
    subprocess.run([sys.executable, ROOT / "docs" / "draw_passes.py", tmp_path], check=True, timeout=120)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in (ROOT / "tutorials" / "pictures").glob("passes_*.png"))
    for name in drawn:
        assert np.ptp(imread(tmp_path / name)) > 0.5
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "kernels").rglob("*.py"))
    script = (ROOT / "docs" / "draw_passes.py").read_text(encoding="utf-8")
    kernels = re.findall(r"""Kernel\("(\w+)",""", script)
    assert len(kernels) > 20
    assert all(f"def {name}(" in source for name in kernels)
