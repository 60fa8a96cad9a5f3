"""The documentation site builds without a warning, its links and pictures exist, and pages fit phones and desktops."""

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

from .commands import ROOT
from .forked_python import forked_python

PAGES = [
    "docs/index.html",
    "docs/quickstart.html",
    "docs/commands.html",
    "docs/which_mixer.html",
    "docs/zoo.html",
    "docs/architecture.html",
    "docs/reference.html",
    "docs/reproductions.html",
    "tutorials/01_first_hybrid.html",
]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
# what reaches beyond the right edge and is not in a box that scrolls
OVERFLOW = """() => {
  const own = e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
  const scrolls = e => e.tagName !== 'ARTICLE' && (own(e) || scrolls(e.parentElement));
  const wide = e => Math.max(e.getBoundingClientRect().right, e.getBoundingClientRect().left + e.scrollWidth);
  return [...document.querySelectorAll('article *')]
    .filter(e => wide(e) > innerWidth + 1 && !scrolls(e)).map(e => e.outerHTML.slice(0, 200));
}"""
MISSING = "() => [...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; warnings, such as a heading or type that does not exist, are errors."""
    if not os.environ.get("CI"):
        for package in ("furo", "latex2mathml", "sphinx_copybutton"):
            pytest.importorskip(package, reason="install the extra 'docs'")
    folder = tmp_path_factory.mktemp("site")
    command = [forked_python(), "-m", "sphinx", "-qW", "--keep-going", "-c", "docs", ".", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=1200)
    if done.returncode:
        pytest.fail(done.stderr[-8000:], pytrace=False)
    return folder


class Page(HTMLParser):
    """The ids of an HTML page, and the targets of its links and pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.targets = set[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is not None and name == "id":
                self.ids.add(value)
            elif value is not None and (tag, name) in (("a", "href"), ("img", "src")):
                self.targets.append(value)


@pytest.mark.slow
def test_references_links_and_pictures_exist(site: Path):
    pages = {page: Page() for page in site.rglob("*.html")}
    for page, parser in pages.items():
        parser.feed(page.read_text(encoding="utf-8"))
    assert {"kernels.delta_rule", "mixers.check_mixer", "zoo.build"} <= pages[site / "docs" / "reference.html"].ids
    for page, parser in pages.items():
        for target in parser.targets:
            path, fragment = urldefrag(unquote(target))
            if "://" in path or path.startswith(("data:", "mailto:")):
                continue
            file = (page.parent / path).resolve() if path else page
            assert file.is_file(), f"{page.relative_to(site)} refers to {target}"
            assert not fragment or file not in pages or fragment in pages[file].ids, (
                f"{page.relative_to(site)}: {target}"
            )


@pytest.mark.slow
def test_formulas_code_and_navigation(site: Path):
    html = (site / "docs" / "zoo.html").read_text(encoding="utf-8")
    assert "<msub><mi>S</mi><mi>t</mi></msub>" in html
    assert "copybutton.js" in html
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert all(f'href="{address}"' in html for address in project.get("urls", {}).values())
    notebook = (site / "tutorials" / "quickstart.html").read_text(encoding="utf-8")
    assert "highlight-python" in notebook
    for page in site.rglob("*.html"):  # nothing is read from a network
        text = page.read_text(encoding="utf-8")
        assert not re.search(
            r'<(script|img)[^>]* src="(https?:)?//|<link[^>]*stylesheet[^>]* href="(https?:)?//', text
        ), page


def test_the_navigation_stays_short():
    trees = re.findall(r"```{toctree}\n(.*?)```", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]) <= 32


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium with an empty profile."""
    playwright = pytest.importorskip("playwright.sync_api", reason="install the extra 'docs'")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        profile = tmp_path_factory.mktemp("profile")
        context = driver.chromium.launch_persistent_context(profile, executable_path=CHROMIUM, args=FLAGS)
        yield context
        context.close()


@pytest.mark.nightly
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_in_a_browser(name: str, width: int, site: Path, browser: Any):
    page, errors = browser.new_page(), list[str]()
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda request: errors.append(request.url))
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((site / name).as_uri(), wait_until="load")
    page.evaluate("() => document.images.length && [...document.images].forEach(i => i.loading = 'eager')")
    page.wait_for_load_state("networkidle")
    assert not errors
    assert not page.evaluate(MISSING)
    assert not page.evaluate(OVERFLOW)
    page.close()


@pytest.mark.nightly
def test_a_page_that_is_too_wide_is_noticed(site: Path, browser: Any):
    page = browser.new_page()
    page.set_viewport_size({"width": 390, "height": 900})
    page.goto((site / PAGES[0]).as_uri())
    wide = "<nobr>" + 99 * "x" + "</nobr><img src=nothing.png>"
    page.evaluate("wide => document.querySelector('article p').innerHTML = wide", wide)
    page.wait_for_load_state("networkidle")
    assert page.evaluate(OVERFLOW)
    assert page.evaluate(MISSING)
    page.close()
