"""What documents refer to exists.

Their commands are in `test_documented_commands.py`, tutorials in `test_tutorials.py`, links in `test_site.py`.
"""

import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from docs import draw_compare
from docs.tables import QUERIES, QUERY, TABLE, queries, render, rewrite
from reproductions import performance
from reproductions.write_csv import read

from .commands import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]  # what is true now
PACKAGES = "kernels|mixers|zoo"
FOLDERS = f"{PACKAGES}|configs|dev|docs|reproductions/measured|tests|tutorials"
RENDERED = {"reproductions", "reproductions_partly", "reproductions_not_run"}  # written by a program
CONCLUSIONS = ("which_mixer", "recall", "needles", "scaling", "performance", "statex", "parity")
CODE = re.compile(r"^```.*?^```[^\n]*$|`[^`]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
DECIMAL = re.compile(r"(?<![\w.])\d*\.\d+(?![.\d]*\.\d)(?!\d)")


def mentioned(page: Path, pattern: str) -> list[str]:
    """What a page names in backticks, outside of blocks of code; `my_…` is the reader's own."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [actual for actual in re.findall(pattern, prose) if "my_" not in actual and "MY_" not in actual]


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


def test_the_pages_stay_short():
    words = {page.stem: len(page.read_text(encoding="utf-8").split()) for page in PAGES[2:]}
    assert {page: count for page, count in words.items() if count > 3000} == {}
    assert sum(words.values()) <= 50_000
    assert len(words) <= 32
    assert len((ROOT / "dev" / "LOG.md").read_text(encoding="utf-8").split()) <= 8000


def test_files_named_in_the_code_exist():
    code = [
        ROOT / "cli.py",
        *(path for folder in ("kernels", "mixers", "zoo") for path in (ROOT / folder).rglob("*.py")),
    ]
    named = {
        name
        for path in code
        for name in re.findall(rf"\b(?:{FOLDERS})/[\w./-]+\.(?:py|md|toml)\b", path.read_text("utf-8"))
    }
    assert len(named) > 9
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in RENDERED], ids=lambda page: page.stem)
def test_generated_tables_follow_their_rows(page: Path):
    """`python docs/tables.py` writes them."""
    text = page.read_text(encoding="utf-8")
    assert rewrite(text) == text


def test_each_query_has_one_name_and_a_table():
    names = [name for name, _, _ in QUERY.findall(QUERIES.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted({name for page in PAGES for _, _, name, *_ in TABLE.findall(page.read_text())})


def test_a_table_is_written_from_its_rows(tmp_path: Path):
    rows = tmp_path / "rows.csv"
    rows.write_text("name,x,list\na,1,0.5 0.25\nb,2.5,0.125 0.5\na,4,\n")
    sql = "select name, median(x) as middle, max(word(list, -1)) as last from rows group by name"
    assert render(rows, sql).splitlines()[2:] == ["| a | 2.5 | 0.25 |", "| b | 2.5 | 0.5 |"]


def test_a_number_that_is_missing_is_a_dash(tmp_path: Path):
    rows = tmp_path / "rows.csv"
    rows.write_text("ms,peers.fla chunk_gla.ms,peers.fla chunk_kda.ms\n1,,2.25\n4,8,\n5,,\n")
    sql = "select formatted('%.1f / %.2f', ms, field(rowid, 'peers.fla *.ms')), field(rowid, 'peers.cudnn*') from rows"
    assert render(rows, sql).splitlines()[2:] == ["| 1.0 / 2.25 | – |", "| 4.0 / 8.00 | – |", "| – | – |"]


def test_the_performance_numbers_come_from_one_commit_and_kind_of_machine():
    parts = {job.part for job in performance.jobs(tiny=False, peers=True)}
    files = {part: ROOT / "reproductions" / "measured" / f"performance_{part}.csv" for part in parts}
    shown = (queries()[name][0] for _, _, name, *_ in TABLE.findall((ROOT / "docs" / "performance.md").read_text()))
    assert {*files.values()} == {file for file in shown if file.name.startswith("performance_")}
    rows = [row for file in files.values() for row in read(file)]
    assert {row["part"] for row in rows} == parts
    assert len({(row["device"], row["torch"], row["triton"], row["date"], row["commit"]) for row in rows}) == 1
    assert {row["tiny"] for row in rows} == {"False"}
    assert "False" not in {row.get("gate.passed") for row in rows}
    assert not [row["commit"] for row in rows if row["commit"].endswith("+")]  # of files that differ from the commit


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in RENDERED], ids=lambda page: page.stem)
def test_decimals_are_generated_or_listed(page: Path):
    """A decimal that no query writes is in docs/decimals.toml, which has no others, and is written with its zero."""
    listed = tomllib.loads((ROOT / "docs" / "decimals.toml").read_text()).get(page.stem, "").split()
    text = CODE.sub("", COMMENT.sub("", TABLE.sub("", page.read_text(encoding="utf-8"))))
    decimals = {decimal for decimal in DECIMAL.findall(text) if not re.fullmatch(r"\d{4}\.\d{5}", decimal)}  # arXiv
    assert decimals == set(listed)
    assert not [decimal for decimal in decimals if decimal.startswith(".")]


@pytest.mark.parametrize("name", CONCLUSIONS)
def test_a_conclusion_says_what_it_rests_on(name: str):
    assert len(re.findall(r"^\*\*Evidence\*\*: ", (ROOT / "docs" / f"{name}.md").read_text(), re.MULTILINE)) == 1


def test_the_links_of_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = target.partition("#")
        assert "://" in target or (ROOT / path).exists(), target
        assert not heading, "headings are checked on the site only"


@pytest.mark.slow
def test_the_picture_of_readme_shows_its_rows(tmp_path: Path):
    file = draw_compare.draw(tmp_path)
    committed = imread(ROOT / "tutorials" / "pictures" / "compare.png")
    assert committed.shape[:2] == imread(file).shape[:2]
    assert np.mean(np.abs(committed[..., :3] - imread(file)[..., :3])) < 0.05  # fonts differ between machines


@pytest.mark.slow
def test_the_picture_of_the_delta_family_is_what_is_computed(tmp_path: Path):
    subprocess.run([sys.executable, ROOT / "docs" / "draw_delta_family.py", tmp_path], check=True, timeout=120)
    drawn, committed = (imread(folder / "delta_family.png") for folder in (tmp_path, ROOT / "tutorials" / "pictures"))
    assert drawn.shape == committed.shape
    assert np.mean(np.abs(drawn - committed)) < 0.02  # fonts differ between machines


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
