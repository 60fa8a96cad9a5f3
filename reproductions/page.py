"""Tables and figures of the papers: what each claims, what it takes to repeat it, and what was measured here.

`python reproductions/page.py` writes the three pages docs/reproductions*.md from the YAML and CSV files next to this
script. The constructors' arguments are the keys of the YAML.
"""

import csv
import inspect
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal, get_args

from kernels import UserError
from mixers import did_you_mean
from zoo.config.merge import merged
from zoo.config.resolve import built, resolved
from zoo.config.signatures import Parameter
from zoo.files.safe_yaml import read_yaml

FOLDER = Path(__file__).parent
Status = Literal["contradicted", "open", "partly", "reproduced", "not run"]
DOCS = FOLDER.parent / "docs"

TOP = """\
# Reproductions

<!-- Written by `python reproductions/page.py` from the files in `reproductions/`. Edit those, not this page. -->

Tables and figures of five papers: first those that contradict our measurements, that these leave open, or whose effect
is smaller than the differences between our seeds, then those that are reproduced. Others are [reproduced in
part](reproductions_partly.md) or [were not run](reproductions_not_run.md). A status is about the claim, and rests on a
measurement or a test in this repository, mostly of models far smaller than the paper's. *Open* means that our runs do
not decide it by the [protocol](protocol.md), whichever way they point. The link behind each claim leads to its file,
with the commands for the paper's size.

Four choices here differ from the papers, or fill in what they leave out:

- **Cosine schedules end at 10 % of the peak** (`optim.min_learning_rate_ratio`), where Gated DeltaNet's and the
  state-expansion paper name no last rate. StateX's paper names none, either; its configs here end at 0.
- **Needles in text begin with RULER's words** for one needle ("A special magic number is hidden"), where StateX prints
  the plural ("Some special magic numbers are hidden").
- **The output gates of TNL and cosFormer2 read the layer's normed input**, where the scaling-law paper's formulas have
  the input before the norm.
- **HGRN1 is the real-valued variant**, to which the HGRN2 paper keeps as well; HGRN's own recurrence is complex.

```{toctree}
:hidden:

reproductions_partly
reproductions_not_run
```
"""

PARTLY = """\
# Reproductions in part

<!-- Written by `python reproductions/page.py` from the files in `reproductions/`. Edit those, not this page. -->

Tables and figures of which our measurements agree with a part. [Reproductions](reproductions.md) explains the rows.
"""

NOT_RUN = """\
# Reproductions that were not run

<!-- Written by `python reproductions/page.py` from the files in `reproductions/`. Edit those, not this page. -->

These tables and figures of the five papers have not been measured here; [another page](reproductions.md) has the rest.
Each row links a file with its commands, the data that they need, notes, and the arithmetic of the hours. Hours are
estimates for one H200, with 175k tokens/s for 400M parameters and as many FLOPs a second at other sizes. Commands
expect a corpus as `corpus`, its tokenizer as `tokenizer.json`, and the files of benchmarks in `benchmarks`
([Data](data.md), [Evaluation](evaluation.md)). They train a few of a row's models; the others differ in a factor, a
size or an overlay.
"""


@dataclass(frozen=True)
class Measured:
    """Numbers of a file that a row shows, for each combination of values: the median and all seeds.

    Args:
        file: A CSV file of this repository with a line for each run or evaluation, such as the `sweep.csv` of a sweep,
            or for each row of a benchmark, which has no seeds.
        by: The columns that tell the combinations apart.
        metric: The column of the numbers.
        where: The lines to read, by the values of columns; null: all.
        across: Another such column, whose values become the columns of the table, which then has medians alone.
    """

    file: str
    by: list[str]
    metric: str
    where: dict[str, str] | None = None
    across: str | None = None

    def numbers(self, root: Path) -> dict[tuple[str, ...], list[float]]:
        """The numbers of each combination, in the order of the seeds; none where a benchmark has no result.

        Args:
            root: The folder of the repository.

        Raises:
            UserError: The file or a column is missing, no line is to be read, or a seed is there twice.
        """
        if not (root / self.file).is_file():
            raise UserError(f"ours.measured.file: there is no {self.file}")
        with (root / self.file).open(encoding="utf-8", newline="") as stream:
            chosen, lines = self.where or {}, list(csv.DictReader(stream))
        columns = [*self.by, *([self.across] if self.across else [])]
        header = lines[0] if lines else {}
        for column in (*columns, self.metric, *chosen):
            if lines and column not in header:
                raise UserError(f"ours.measured: {self.file} has no column {column!r}{did_you_mean(column, header)}")
        by_labels: dict[tuple[str, ...], dict[int, float]] = {}
        for line in lines:
            if all(line[column] == value for column, value in chosen.items()):
                values = by_labels.setdefault(tuple(line[column] for column in columns), {})
                seed = int(line["seed"]) if "seed" in line else len(values)
                if seed in values:
                    raise UserError(f"ours.measured: {self.file} has seed {seed} twice; `where` can choose")
                if line[self.metric]:
                    values[seed] = float(line[self.metric])
        if not by_labels:
            raise UserError(f"ours.measured.where: no line of {self.file} is chosen")
        return {labels: [values[seed] for seed in sorted(values)] for labels, values in by_labels.items()}

    def table(self, root: Path) -> Iterator[str]:
        """Return the numbers as a table in Markdown, line by line."""
        numbers = self.numbers(root)
        only = "".join(f", {_short(column)} {value}" for column, value in (self.where or {}).items() if value)
        by, metric = list(map(_short, self.by)), f"{_short(self.metric)}{only}"
        if self.across is None:
            yield _row([*by, f"{metric}: median", "all seeds"])
            yield _row(["---"] * (len(by) + 2), "")
            for labels, values in numbers.items():
                yield _row([*labels, _middle(values), " ".join(map(_figure, values))])
            return
        yield from (f"{metric[0].upper()}{metric[1:]}:", "")
        across = list(dict.fromkeys(labels[-1] for labels in numbers))
        yield _row([*by, *(f"{_short(self.across)} {value}" for value in across)])
        yield _row(["---"] * (len(by) + len(across)), "")
        for labels in dict.fromkeys(labels[:-1] for labels in numbers):
            yield _row([*labels, *(_middle(numbers.get((*labels, value), [])) for value in across)])


def _row(cells: list[str], around: str = " ") -> str:
    """A line of a table in Markdown."""
    return "|" + "".join(f"{around}{cell}{around}|" for cell in cells)


def _middle(values: list[float]) -> str:
    """The median; a dash if there are none."""
    return _figure(statistics.median(values)) if values else "–"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"


def _short(column: str) -> str:
    return re.sub(r"\bval\b", "validation", column.rpartition(".")[2].replace("_", " "))


@dataclass(frozen=True)
class Needs:
    """Resources that a table or figure takes at the paper's size.

    Args:
        gpu_hours: Hours of one H200.
        arithmetic: Where the hours come from.
        data: Corpora, tokenizers, public checkpoints and benchmarks; null: none.
        missing: What this project lacks for it, such as "a config for …"; null: nothing.
    """

    gpu_hours: float
    arithmetic: str
    data: str | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Ours:
    """Our measurement.

    Args:
        result: What came out, in words.
        date: When, as YYYY-MM-DD.
        machine: On what.
        seeds: How many seeds; null where nothing is drawn at random.
        size: Of the models and their data.
        command: What measured it: `python cli.py …`, `python reproductions/…` or `python tutorials/…`, or `pytest …`
            where a test enforces it.
        sources: Files of this repository that hold the numbers, or tests that hold the result.
        spread_hides_effect: Whether the seeds differ by more than what they are to show.
        measured: The numbers, as a file has them; null where `result` or a test has them.
        tokens_per_parameter: Of the training; null where nothing was trained, or not on text.
        short_of_protocol: What docs/protocol.md requires and the measurement lacks; null: nothing.
    """

    result: str
    date: str
    machine: str
    seeds: int | None
    size: str
    command: str
    sources: list[str]
    spread_hides_effect: bool = False
    measured: Measured | None = None
    tokens_per_parameter: float | None = None
    short_of_protocol: str | None = None


@dataclass(frozen=True)
class Row:
    """A table or figure.

    Args:
        claim: What it claims, in a sentence.
        status: Whether our measurement agrees with the claim.
        needs: What it takes at the paper's size.
        commands: What repeats it at the paper's size, or in miniature where the note says so.
        printed: The paper's numbers that matter most for the claim, by what they are of.
        ours: What we measured; null if nothing.
        note: What else a reader has to know; null: nothing.
        picture: Path of a picture of what we measured; null: none.

    Raises:
        UserError: The status does not fit what was measured, there is neither a command nor a reason for that, or
            what we measured has no date, command or source.
    """

    claim: str
    status: Status
    needs: Needs
    commands: list[str] | None = None
    printed: dict[str, float | str | list[float]] | None = None
    ours: Ours | None = None
    note: str | None = None
    picture: str | None = None

    def __post_init__(self) -> None:
        if (self.status == "not run") != (self.ours is None):
            needed = "must be left out" if self.ours is not None else "must say what was measured"
            raise UserError(f"status: it is {self.status!r}, so `ours` {needed}")
        if not self.commands and self.needs.missing is None:
            raise UserError("commands: there are none; needs.missing must say what they lack, such as 'a config for …'")
        for command in self.commands or []:
            if not command.startswith(("python cli.py ", "python reproductions/")):
                raise UserError(
                    f"commands: {command!r} begins neither with 'python cli.py' nor with 'python reproductions/'"
                )

        if self.ours is not None:
            _check(self.ours)
            short = self.ours.short_of_protocol
            if self.status == "contradicted" and short is not None:
                raise UserError(
                    f"status: 'contradicted' needs a measurement by the protocol, not {short!r}; write 'open'"
                )

    @property
    def warns(self) -> bool:
        """Return whether readers have to be warned: a claim is contradicted or open, or the spread hides the effect."""
        hidden = self.ours is not None and self.ours.spread_hides_effect
        return self.status in ("contradicted", "open") or hidden


def _check(ours: Ours) -> None:
    """Not by `Ours` itself, since the parser would bury the sentence in a list of types that it tried."""
    try:
        date.fromisoformat(ours.date)
    except ValueError:
        raise UserError(f"ours.date: {ours.date!r} is not a date; write YYYY-MM-DD") from None
    if not ours.sources:
        raise UserError("ours.sources: the list is empty; name the file or the test that holds the result")
    starts = ("python cli.py ", "python reproductions/", "python tutorials/", "pytest ")
    if not ours.command.startswith(starts):
        raise UserError(f"ours.command: {ours.command!r} begins with none of {', '.join(starts)}")


@dataclass(frozen=True)
class Listing:
    """Tables and figures of a paper.

    Args:
        title: Its title.
        short: The start of the title, for headings.
        url: Where it can be read; null if we know no address.
        items: All of its tables and figures, such as "Table 3".
    """

    title: str
    short: str
    items: list[str]
    url: str | None = None


@dataclass(frozen=True)
class Paper:
    """A paper, the folder of its rows, and the rows in the order of its listing: "Table 3" → row."""

    folder: str
    listing: Listing
    rows: dict[str, Row]


def read_papers(folder: Path = FOLDER) -> list[Paper]:
    """Read `papers.yaml` and, for each paper in it, the rows: Table 3 of `statex` is `statex/table_3.yaml`.

    Raises:
        UserError: A file is missing, is of no table or figure in papers.yaml, or has a wrong key or value.
    """
    papers, expected_files = [], {folder / f"{name}.yaml" for name in ("listops", "paper_tables", "papers")}
    for name, contents in read_yaml(folder / "papers.yaml", "reproductions").items():
        listing = _built(Listing, contents, f"papers.yaml: {name}")
        files = {item: folder / name / _file_name(item) for item in listing.items}
        if missing := [item for item, file in files.items() if not file.is_file()]:
            raise UserError(f"reproductions: {', '.join(missing)} of {name} has no row; write {files[missing[0]]}")
        rows = {
            item: _built(Row, read_yaml(file, "reproductions"), f"{name}/{file.name}") for item, file in files.items()
        }
        papers.append(Paper(name, listing, rows))
        expected_files |= {*files.values()}
    others = {
        file
        for name in ("cloze", "mad_tasks", "mqar_variants", "scrolls", "sweeps")
        for file in (folder / name).glob("*.yaml")
    }
    if strange := sorted({*folder.rglob("*.yaml")} - expected_files - others):
        raise UserError(f"reproductions: {strange[0]} is of no table or figure in {folder / 'papers.yaml'}")
    return papers


def _file_name(item: str) -> str:
    """Return the file name of a row: `table_s1.yaml` for "Table S.1"."""
    return f"{item.lower().replace('.', '').replace(',', '').replace(' ', '_')}.yaml"


def _built(kind: type, contents: Any, where: str) -> Any:
    """A dataclass from plain containers; an error message names the file."""
    try:
        return built(resolved(merged([{"row": contents}]), {"row": Parameter(kind, inspect.Parameter.empty)}).row, kind)
    except UserError as error:
        raise UserError(f"reproductions: {where}: {str(error).replace('row.', '')}") from None


def pages(papers: Sequence[Paper]) -> dict[str, str]:
    """Return the pages as Markdown by their names; the first one begins with what warns a reader."""
    measured = [(paper, item, row) for paper in papers for item, row in paper.rows.items() if row.ours is not None]
    measured.sort(key=lambda entry: _rank(entry[2]))  # keeps the order of the papers
    texts = {"reproductions": [TOP, *_counts(papers)], "reproductions_partly": [PARTLY]}
    tables: dict[str, dict[str, str]] = {name: {} for name in texts}
    for paper, item, row in measured:
        name = "reproductions" if row.warns or row.status == "reproduced" else "reproductions_partly"
        texts[name] += _measured(paper, item, row, tables[name])
    texts["reproductions_not_run"] = [NOT_RUN, *(line for paper in papers for line in _not_run(paper))]
    return {name: "\n".join(lines).rstrip() + "\n" for name, lines in texts.items()}


def _rank(row: Row) -> tuple[bool, int]:
    return not row.warns, ("contradicted", "open", "reproduced", "partly").index(row.status)


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


def _measured(paper: Paper, item: str, row: Row, tables: dict[str, str]) -> Iterator[str]:
    """Yield a row that we measured, as a section; `tables` has the first item of each table."""
    ours = row.ours
    assert ours is not None  # by the choice of rows
    at = "" if ours.tokens_per_parameter is None else f" at {ours.tokens_per_parameter:g} tokens a parameter"
    hidden = ", hidden by the spread over seeds" if ours.spread_hides_effect else ""
    seeds = "nothing random" if ours.seeds is None else f"{ours.seeds} seed{'' if ours.seeds == 1 else 's'}"
    sources = ", ".join(f"[`{source}`]({_from_docs(source)})" for source in ours.sources)
    yield from (f"## {item} of {paper.listing.short}: {row.status}{at}{hidden}", "")
    yield from (f"{row.claim} ({_linked(paper, item, 'row')})", "")
    if row.printed:
        yield from (f"**Paper.** {_numbers(row)}.", "")
    yield from (f"**Ours** ({ours.date}, {ours.machine}, {seeds}, {ours.size}). {ours.result} From {sources}.", "")
    if ours.short_of_protocol is not None:
        yield from (f"**Short of the [protocol](protocol.md)**: {ours.short_of_protocol}.", "")
    if ours.measured is not None:
        table = "\n".join(ours.measured.table(FOLDER.parent))
        first = tables.setdefault(table, item)
        yield from (table if first == item else f"The numbers are in the table of {first}.", "")
    if row.note is not None:
        yield from (row.note, "")
    if not ours.command.startswith("pytest "):  # whose tests are among the sources
        yield from ("```bash", ours.command, "```", "")
    if row.picture is not None:
        yield from (f"![{item}]({_from_docs(row.picture)})", "")


def _not_run(paper: Paper) -> Iterator[str]:
    """Yield the rows of a paper that were not run, as a table."""
    rows = {item: row for item, row in paper.rows.items() if row.ours is None}
    if not rows:
        return
    yield from (f"## {paper.listing.title}", "", "| | claim | paper | GPU-hours | missing |", "|---|---|---|---|---|")
    for item, row in rows.items():
        hours, missing = f"{row.needs.gpu_hours:,g}", row.needs.missing or "–"
        cells = (_linked(paper, item, item), row.claim, _numbers(row) or "–", hours, missing)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _linked(paper: Paper, item: str, text: str) -> str:
    """Return a text with a link to the file of a row."""
    return f"[{text}](../reproductions/{paper.folder}/{_file_name(item)})"


def _numbers(row: Row) -> str:
    """The paper's numbers, in a line."""
    parts = []
    for name, value in (row.printed or {}).items():
        values = value if isinstance(value, list) else [value]
        parts.append(f"{name}: {', '.join(each if isinstance(each, str) else f'{each:g}' for each in values)}")
    return "; ".join(parts)


def _from_docs(path: str) -> str:
    """A path of the repository as a link on the page."""
    return Path(path).relative_to("docs").as_posix() if path.startswith("docs/") else f"../{path}"


if __name__ == "__main__":
    for name, text in pages(read_papers()).items():
        (DOCS / f"{name}.md").write_text(text, encoding="utf-8")
