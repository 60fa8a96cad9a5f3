"""The page docs/reproductions.md, from the rows."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from zoo.reproductions.read import FOLDER, Paper
from zoo.reproductions.row import Row, Status

PAGE = FOLDER.parent / "docs" / "reproductions.md"

TOP = """\
# Reproductions

<!-- Written by `python -m zoo.reproductions` from the files in `reproductions/`. Edit those, not this page. -->

Every table and figure of the five papers: what it claims, what we measured, what a repetition needs. A status is about
the claim, and rests on a measurement or a test in this repository, mostly of models far smaller than the paper's; `not
run` means that we have none. Hours are estimates for one H200: 175k tokens/s for 400M parameters
([performance](performance.md)), and as many FLOPs a second at other sizes; evaluating adds little. Commands expect a
corpus as `corpus`, its tokenizer as `tokenizer.json`, and the files of benchmarks in `benchmarks` ([Data](data.md),
[Evaluation](evaluation.md)). They train a few of a row's models; the others differ in a factor, a size or an overlay. A
command that several rows of a list need is printed at the first.
"""


def page(papers: Sequence[Paper]) -> str:
    """The page as Markdown: first what contradicts a paper or is hidden by the spread over seeds."""
    measured = [(paper, item, row) for paper in papers for item, row in paper.rows.items() if row.ours is not None]
    lines = [TOP, *_counts(papers)]
    for title, first in (("Contradicted, or hidden by the spread over seeds", True), ("Reproduced, or partly", False)):
        chosen = [entry for entry in measured if entry[2].stands_first == first]
        # contradictions before all else; sorting keeps the order of the papers
        for index, (paper, item, row) in enumerate(sorted(chosen, key=lambda entry: _rank(entry[2]))):
            lines += [*([f"## {title}", ""] if index == 0 else []), *_measured(paper, item, row)]
    lines += ["## Not run", ""]
    for paper in papers:
        lines += _not_run(paper)
    return "\n".join(lines).rstrip() + "\n"


def _rank(row: Row) -> int:
    return ("contradicted", "reproduced", "partly").index(row.status)


def _counts(papers: Sequence[Paper]) -> Iterator[str]:
    """A table of how many rows of each paper have which status."""
    statuses = get_args(Status)
    yield f"| paper | {' | '.join(statuses)} |"
    yield f"|---|{'---|' * len(statuses)}"
    for paper in papers:
        counts = [sum(row.status == status for row in paper.rows.values()) for status in statuses]
        yield f"| {_cited(paper)} | {' | '.join(map(str, counts))} |"
    yield ""


def _cited(paper: Paper) -> str:
    title = paper.listing.title
    return title if paper.listing.url is None else f"[{title}]({paper.listing.url})"


def _measured(paper: Paper, item: str, row: Row) -> Iterator[str]:
    """A row that we measured, as a section."""
    ours = row.ours
    assert ours is not None  # by the choice of rows
    hidden = ", hidden by the spread over seeds" if ours.spread_hides_effect else ""
    seeds = "nothing random" if ours.seeds is None else f"{ours.seeds} seed{'' if ours.seeds == 1 else 's'}"
    sources = ", ".join(f"[`{source}`]({_from_docs(source)})" for source in ours.sources)
    name = paper.listing.title.partition(":")[0]
    yield from (f"### {item} of {name}: {row.status}{hidden}", "")
    yield from (row.claim, "")
    if row.printed:
        yield from (f"**Paper.** {_numbers(row)}.", "")
    yield from (f"**Ours** ({ours.date}, {ours.machine}, {seeds}, {ours.size}). {ours.result} From {sources}.", "")
    if ours.measured is not None:
        yield from (*ours.measured.table(FOLDER.parent), "")
    if row.note is not None:
        yield from (row.note, "")
    yield from ("```bash", ours.command, "```", "")
    if row.picture is not None:
        yield from (f"![{row.claim}]({_from_docs(row.picture)})", "")
    others = [command for command in row.commands or [] if command != ours.command]
    if others and row.needs.gpu_hours:
        yield from (f"At the paper's size it needs {_needs(row)}. Estimate: {row.needs.arithmetic}.", "")
    if others:
        yield from ("```bash", *others, "```", "")


def _not_run(paper: Paper) -> Iterator[str]:
    """The rows of a paper that were not run, as a table and their commands."""
    rows = {item: row for item, row in paper.rows.items() if row.ours is None}
    if not rows:
        return
    yield from (f"### {paper.listing.title}", "")
    yield from ("| | claim | paper | status | estimate |", "|---|---|---|---|---|")
    for item, row in rows.items():
        claim = row.claim if row.note is None else f"{row.claim} {row.note}"
        cells = (item, claim, _numbers(row), f"not run (needs {_needs(row)})", row.needs.arithmetic)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield from ("", "```bash")
    printed: set[str] = set()
    for item, row in rows.items():
        if row.commands:
            yield from (f"# {item}", *(command for command in row.commands if command not in printed))
            printed |= {*row.commands}
    yield from ("```", "")


def _numbers(row: Row) -> str:
    """The paper's numbers, in a line."""
    parts = []
    for name, value in (row.printed or {}).items():
        values = value if isinstance(value, list) else [value]
        parts.append(f"{name}: {', '.join(each if isinstance(each, str) else f'{each:g}' for each in values)}")
    return "; ".join(parts)


def _needs(row: Row) -> str:
    needs = row.needs
    hours = f"{needs.gpu_hours:,g} GPU-hour{'' if needs.gpu_hours == 1 else 's'}" if needs.gpu_hours else None
    return "; ".join(part for part in (hours, needs.data, needs.missing) if part is not None)


def _from_docs(path: str) -> str:
    """A path of the repository as a link on the page."""
    return Path(path).relative_to("docs").as_posix() if path.startswith("docs/") else f"../{path}"
