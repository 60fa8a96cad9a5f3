"""Write what is generated in README, `docs/` and `mixers/__init__.py` again: `python docs/tables.py`.

A generated table is enclosed in two comments. The first one names a query of `reproductions/measured/tables.sql`:

    <!-- table: recall.state -->

    <!-- /table -->

Each query there begins with a line `-- NAME: FILE` and reads the lines of a CSV file as the table `rows`.
`mixers` instead of a file is the registry, one row for each mixer of this project, with the columns of `registered`;
`families` is that of public layouts, with the columns of `public_families`.
`list` instead of `table` writes the first column as names in code style.

Next to SQLite's functions there are `tex(formula)`, a formula in letters as LaTeX; the aggregates `median`, and of
proofs `errors(dtype, says)`; `word(text, n)`, which returns number n, from 0, of several that spaces separate; and
`pairs_at(level, pairs, accuracy, …)`, the pairs recalled with an accuracy of `level`. `formatted(form, number, …)` is
`printf`, but null if a number is null. `field(rowid, pattern)` is the first value of a line in a column whose name
matches the pattern, such as `peers.fla *.fwd_ms`; null if there is none.
"""

import csv
import re
import sqlite3
import statistics
import textwrap
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import mixers
from zoo.experiments.definition import pairs_at
from zoo.lm.mixers_table import measures
from zoo.saved.gguf.architectures import ARCHITECTURES
from zoo.saved.public.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUERIES = ROOT / "reproductions" / "measured" / "tables.sql"
QUERY = re.compile(r"^-- (\S+): (\S+)\n(.*?)(?=^-- \S+: |\Z)", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"(<!-- (table|list): (\S+) -->\n)(.*?)(<!-- /\2 -->)", re.DOTALL)
PACKAGE = ROOT / "mixers" / "__init__.py"
IMPORTS = re.compile(r"(?<=these lines\n)(    from .*\n)+")


class Median:
    """The aggregate `median` of SQL."""

    def __init__(self) -> None:
        self.values = list[float]()

    def step(self, value: float | None) -> None:
        """Add a value; null is left out."""
        if value is not None:
            self.values.append(value)

    def finalize(self) -> float | None:
        """Return the median; null if there is no value."""
        return statistics.median(self.values) if self.values else None


class Errors:
    """The aggregate `errors` of SQL, of the columns dtype and says of proofs."""

    def __init__(self) -> None:
        self.largest = dict[str, float]()

    def step(self, dtype: str, says: str | float) -> None:
        """Add what a proof says: `exact`, an error, or two of them."""
        error = max(0.0 if part == "exact" else float(part) for part in str(says).split(" / "))
        self.largest[dtype] = max(self.largest.get(dtype, 0.0), error)

    def finalize(self) -> str | None:
        """Return the largest errors, fp32 / bf16, or `exact` for both; null if there is no proof."""
        if not any(self.largest.values()):
            return "exact" if self.largest else None
        errors = [self.largest.get(dtype, 0.0) for dtype in ("fp32", "bf16")]
        return " / ".join(f"{error:.0e}" if error else "exact" for error in errors)


def _value(text: str) -> str | int | float | None:
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text or None


def _pairs(level: float, pairs: str, *accuracies: float) -> float:
    return pairs_at(dict(zip(map(int, pairs.split()), accuracies, strict=True)), level)


def _formatted(form: str, *numbers: float | None) -> str | None:
    return None if None in numbers else form % numbers


TEX = {"−": "-", "·": r"\cdot ", "⊙": r"\odot ", "≤": r"\le ", "ᵀ": r"^\top ", "√D": r"\sqrt{D}", "…": r"\dots "}
TEX |= {"α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "θ": r"\theta ", "κ": r"\kappa ", "λ": r"\lambda "}
TEX |= {
    "ρ": r"\rho ",
    "σ": r"\sigma ",
    "φ": r"\varphi ",
    "dt": r"\Delta ",
    "Σ": r"\sum ",
    ",  ": r",\quad ",
    "|": r"\vert ",
}
TEX |= {r"→\operatorname": r"\overrightarrow", r"←\operatorname": r"\overleftarrow", "←": r"\leftarrow "}


def tex(formula: str) -> str:
    """Return a formula of a mixer, such as "S_t = α_t S_{t−1} + k_t v_tᵀ", as LaTeX between dollars."""
    formula = re.sub(r"(?<![A-Za-z])(?!then|times)[A-Za-z]{3,}", r"\\operatorname{\g<0>}", formula)
    formula = re.sub(r" (then|times) ", r"\\text{ \1 }", formula)
    for text, command in TEX.items():
        formula = formula.replace(text, command)
    formula = re.sub(" +(?=[ _^,})])", "", formula).strip()
    return f"${formula}$"


def own_mixers() -> list[str]:
    """Return the names of this project's mixers, without those of installed plug-ins."""
    return [name for name in mixers.names() if mixers.get(name).__module__.startswith("mixers.")]


@cache
def registered() -> list[list[str]]:
    """Return the registry as lines of text, the column names first."""
    lines = [["name", "recurrence", "paper", "kind"]]
    for name in own_mixers():
        entry = mixers.entry(name)
        grows = measures(entry.mixer, mixers.Site(hidden_size=64, num_heads=1), length=1).grows
        kind = "matrix" if issubclass(entry.mixer, mixers.LinearMixer) else "tokens" if grows else "other"
        lines.append([name, entry.recurrence, entry.paper, kind])
    return lines


@cache
def public_families() -> list[list[str]]:
    """Return the families of public layouts as lines of text, the column names first, with their dated comparisons."""
    with (ROOT / "docs" / "public_families.csv").open(encoding="utf-8", newline="") as stream:
        compared = {row["family"]: row for row in csv.DictReader(stream)}
    columns = ["configs", "models", "tensors", "differences", "date"]
    lines = [["family", "mixers", "reads", "writes", "gguf", *columns]]
    for family in FAMILIES:
        names = [f"`{name}`" for name in family.model_types]
        row = compared.get(family.name, dict.fromkeys(columns, ""))
        lines.append(
            [
                family.name,
                ", ".join(sorted(family.mixers)),
                ", ".join(names) or "without a `model_type`",
                f"`{family.architecture}`",
                f"`{ARCHITECTURES[family.name].name}`" if family.name in ARCHITECTURES else "",
                *(row[column] for column in columns),
            ]
        )
    return lines


REGISTRIES = {ROOT / "mixers": registered, ROOT / "families": public_families}


@cache
def queries() -> dict[str, tuple[Path, str]]:
    """Return the file and the SQL of each query by its name."""
    return {name: (ROOT / file, sql) for name, file, sql in QUERY.findall(QUERIES.read_text(encoding="utf-8"))}


def query(file: Path, sql: str) -> tuple[list[str], list[Sequence[object]]]:
    """Return the column names and the lines of a query over a CSV file or a registry, `mixers` or `families`."""
    if file in REGISTRIES:
        header, *lines = REGISTRIES[file]()
    else:
        with file.open(encoding="utf-8", newline="") as stream:
            header, *lines = csv.reader(stream)
    base = sqlite3.connect(":memory:")
    base.create_aggregate("median", 1, Median)  # type: ignore[arg-type]  # typeshed wants an int of `finalize`
    base.create_aggregate("errors", 2, Errors)  # type: ignore[arg-type]
    base.create_function("word", 2, lambda text, n: None if text is None else float(str(text).split()[n]))
    base.create_function("pairs_at", -1, _pairs)
    base.create_function("tex", 1, tex)
    base.create_function("formatted", -1, _formatted)
    names = ", ".join(f'"{name}"' for name in header)
    base.execute(f"create table rows ({names})")
    table = [[_value(text) for text in line] for line in lines]
    base.executemany(f"insert into rows values ({', '.join('?' * len(header))})", table)

    def field(rowid: int, pattern: str) -> str | int | float | None:
        values = zip(header, table[rowid - 1], strict=True)
        return next((value for name, value in values if value is not None and fnmatchcase(name, pattern)), None)

    base.create_function("field", 2, field)
    answer = base.execute(sql)
    return [column[0] for column in answer.description], answer.fetchall()


def render(file: Path, sql: str, form: str = "table") -> str:
    """Return the result of a query in Markdown: as a table, or its first column as a list of names."""
    columns, lines = query(file, sql)
    if form == "list":
        return textwrap.fill(", ".join(f"`{line[0]}`" for line in lines), width=120) + "\n"
    cells = [
        columns,
        ["---"] * len(columns),
        *(["–" if cell is None else str(cell).replace("|", "\\|") for cell in line] for line in lines),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def rewrite(text: str) -> str:
    """Return a page with all of its generated tables written again."""
    return TABLE.sub(lambda m: f"{m[1]}\n{render(*queries()[m[3]], m[2])}\n{m[5]}", text)


def with_imports(text: str) -> str:
    """Return `mixers/__init__.py` with the imports that tell editors and type checkers its mixers."""
    modules = sorted((mixers.get(name).__module__.rpartition(".")[2], name) for name in own_mixers())
    return IMPORTS.sub("".join(f"    from .{module} import {name} as {name}\n" for module, name in modules), text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rewrite(page.read_text(encoding="utf-8")), encoding="utf-8")
    PACKAGE.write_text(with_imports(PACKAGE.read_text(encoding="utf-8")), encoding="utf-8")
