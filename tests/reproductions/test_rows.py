"""The rows: every table and figure has one, in a form that says what is wrong with it, and the page is theirs."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from kernels import UserError
from reproductions import write_csv
from reproductions.page import FOLDER, Measured, Paper, pages, read_papers
from tests.commands import ROOT

# tables and figures that the papers have, counted in the papers
COUNTS = {
    "Scaling up the State Size of RNN LLMs for Long-Context Scenarios": (12, 3),
    "StateX: Enhancing RNN Recall via Post-training State Expansion": (8, 6),  # the needles have no number of their own
    "HGRN2: Gated Linear RNNs with State Expansion": (12, 5),
    "Scaling Laws for Linear Complexity Language Models": (14, 2),
    "Gated Delta Networks: Improving Mamba2 with Delta Rule": (7, 3),
}


@pytest.fixture(scope="module")
def papers() -> list[Paper]:
    return read_papers()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the shortest of the papers, to be spoiled."""
    (tmp_path / "papers.yaml").write_text("paper: {title: A Paper, short: Paper, items: [Table 1, Table S.1]}")
    (tmp_path / "paper").mkdir()
    for item in ("table_1", "table_s1"):
        shutil.copy(FOLDER / "state_expansion" / "table_7.yaml", tmp_path / "paper" / f"{item}.yaml")
    return tmp_path


@pytest.mark.slow
def test_every_table_and_figure_of_the_five_papers_has_a_row(papers: list[Paper]):
    counts = {}
    for paper in papers:
        assert [*paper.rows] == paper.listing.items
        tables = sum(item.startswith("Table") for item in paper.rows)
        counts[paper.listing.title] = (tables, len(paper.rows) - tables)
    assert counts == COUNTS


def test_what_rows_point_at_exists(papers: list[Paper]):
    for row in (row for paper in papers for row in paper.rows.values()):
        sources = [] if row.ours is None else row.ours.sources
        pictures = [] if row.picture is None else [row.picture]
        for path in (*sources, *pictures):
            assert (ROOT / path).is_file(), path


def test_the_pages_are_what_the_rows_say(papers: list[Paper]):
    for name, text in pages(papers).items():
        assert (ROOT / "docs" / f"{name}.md").read_text() == text, "run `python reproductions/page.py`"


def test_every_row_is_on_one_page_with_a_link_to_its_file(papers: list[Paper]):
    texts = pages(papers)
    for paper in papers:
        for item, row in paper.rows.items():
            file = f"../reproductions/{paper.folder}/{re.sub('[.,]', '', item.lower()).replace(' ', '_')}.yaml"
            (name,) = (name for name, text in texts.items() if f"]({file})" in text)
            assert row.claim.replace("|", r"\|") in texts[name]
            assert (name == "reproductions_not_run") == (row.ours is None)


def test_what_warns_a_reader_comes_first(papers: list[Paper]):
    heading = re.compile(r"^## .* of .*: (contradicted|open|partly|reproduced)(.*)$", re.MULTILINE)
    first, second, _ = (heading.findall(text) for text in pages(papers).values())
    warnings = [status in ("contradicted", "open") or "hidden by the spread" in rest for status, rest in first]
    assert any(warnings)
    assert warnings == sorted(warnings, reverse=True)
    assert {status for status, _ in second} == {"partly"}
    assert not any("hidden" in rest for _, rest in second)
    assert len(first) + len(second) == sum(row.ours is not None for paper in papers for row in paper.rows.values())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("claim:", "clam:", r"paper/table_1.yaml: clam: unknown key; did you mean 'claim'\?"),
        (
            "status: partly",
            "status: refuted",
            "status: 'refuted' is not one of contradicted, open, partly, reproduced,",
        ),
        (
            "status: partly",
            "status: contradicted",
            "status: 'contradicted' needs a measurement by the protocol, not 'three",
        ),
        ("status: partly", "status: not run", "status: it is 'not run', so `ours` must be left out"),
        ("'2026-11-30'", "'yesterday'", r"table_1.yaml: ours.date: 'yesterday' is not a date; write YYYY-MM-DD"),
        (
            "command: python cli.py sweep",
            "command: python sweep",
            "ours.command: 'python sweep .*' begins with none of python cli.py",
        ),
        ("- python cli.py fit", "- python fit", r"commands: 'python fit .*' begins neither with 'python cli.py' nor"),
        ("gpu_hours: 216", "gpu_hours: many", r"table_1.yaml: needs.gpu_hours: 'many'"),
    ],
)
def test_a_mistake_in_a_row_is_told_in_a_sentence(folder: Path, old: str, new: str, message: str):
    file = folder / "paper" / "table_1.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message) as error:
        read_papers(folder)
    assert "\n" not in str(error.value)


CSV = "model,seed,learning.rate,val_loss\nsmall,1,.1,2.5\nsmall,0,.1,2\nlarge,0,.1,1\nlarge,0,.2,3\nlarge,1,.1,1.25\n"


def measured(folder: Path, **given: Any) -> Measured:
    (folder / "sweep.csv").write_text(CSV)
    return Measured(**{"file": "sweep.csv", "by": ["model"], "metric": "val_loss"} | given)


def test_numbers_come_from_their_file(tmp_path: Path):
    actual = measured(tmp_path, where={"learning.rate": ".1"})
    assert actual.numbers(tmp_path) == {("small",): [2.0, 2.5], ("large",): [1.0, 1.25]}
    assert [*actual.table(tmp_path)] == [
        "| model | validation loss, rate .1: median | all seeds |",
        "|---|---|---|",
        "| small | 2.250 | 2.000 2.500 |",
        "| large | 1.125 | 1.000 1.250 |",
    ]


def test_numbers_of_a_benchmark(tmp_path: Path):
    rows = [{"model": "b", "length": 8, "note": "does not fit"}, {"model": "a", "length": 8, "speed": 2000.4}]
    rows += [{"model": "a", "length": 16, "speed": 9.5}, {"model": "a", "length": 16, "speed": 10.5}]
    (tmp_path / "bench.json").write_text(json.dumps({"kind": "length", "device": "gpu", "rows": rows}))
    write_csv.write(write_csv.benchmark(tmp_path / "bench.json"), tmp_path / "bench.csv")
    assert (tmp_path / "bench.csv").read_text().splitlines()[:2] == [
        "kind,device,model,length,note,speed",
        "length,gpu,b,8,does not fit,",
    ]
    actual = Measured("bench.csv", ["model"], "speed", across="length")
    assert actual.numbers(tmp_path) == {("b", "8"): [], ("a", "8"): [2000.4], ("a", "16"): [9.5, 10.5]}
    assert [*actual.table(tmp_path)] == [
        "Speed:",
        "",
        "| model | length 8 | length 16 |",
        "|---|---|---|",
        "| b | – | – |",
        "| a | 2,000 | 10.000 |",
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"sweep.csv has seed 0 twice; `where` can choose"),
        ({"metric": "val_los"}, r"sweep.csv has no column 'val_los'; did you mean 'val_loss'\?"),
        ({"where": {"model": "none"}}, r"ours.measured.where: no line of sweep.csv is chosen"),
        ({"file": "none.csv"}, r"ours.measured.file: there is no none.csv"),
    ],
)
def test_numbers_that_are_not_in_their_file(given: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(UserError, match=message):
        measured(tmp_path, **given).numbers(tmp_path)


def test_as_many_seeds_as_the_row_says(papers: list[Paper]):
    for row in (row for paper in papers for row in paper.rows.values()):
        if row.ours is not None and row.ours.measured is not None:
            counts = {len(values) for values in row.ours.measured.numbers(ROOT).values()} - {0}
            assert counts == {row.ours.seeds} or row.ours.seeds is None, row.claim


def test_nothing_measured_and_no_command_need_a_reason(folder: Path):
    needs = "needs: {gpu_hours: 1, arithmetic: none}"
    (folder / "paper" / "table_1.yaml").write_text(f"claim: A.\nstatus: reproduced\n{needs}")
    with pytest.raises(UserError, match="status: it is 'reproduced', so `ours` must say what was measured"):
        read_papers(folder)
    (folder / "paper" / "table_1.yaml").write_text(f"claim: A.\nstatus: not run\n{needs}")
    with pytest.raises(UserError, match=r"commands: there are none; needs.missing must say what they lack"):
        read_papers(folder)


def test_no_row_is_missing_or_of_nothing(folder: Path):
    (folder / "paper" / "table_s1.yaml").rename(folder / "paper" / "table_2.yaml")
    with pytest.raises(UserError, match=r"Table S\.1 of paper has no row; write .*/paper/table_s1\.yaml"):
        read_papers(folder)
    shutil.copy(folder / "paper" / "table_2.yaml", folder / "paper" / "table_s1.yaml")
    with pytest.raises(UserError, match=r"/paper/table_2\.yaml is of no table or figure in .*papers\.yaml"):
        read_papers(folder)
