"""Reads the rows of all papers, and sees to it that none is left out."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels import UserError
from zoo.config.parser import Parser, explained
from zoo.files.safe_yaml import read_yaml
from zoo.reproductions.row import Row

FOLDER = Path(__file__).parents[2] / "reproductions"  # in a checkout; wheels do not have it


@dataclass(frozen=True)
class Listing:
    """Tables and figures of a paper.

    Args:
        title: Its title.
        url: Where it can be read; null if we know no address.
        items: All of its tables and figures, such as "Table 3".
    """

    title: str
    items: list[str]
    url: str | None = None


@dataclass(frozen=True)
class Paper:
    """A paper, and its rows in the order of its listing: "Table 3" → row."""

    listing: Listing
    rows: dict[str, Row]


def read_papers(folder: Path = FOLDER) -> list[Paper]:
    """Read `papers.yaml` and, for each paper in it, the rows: Table 3 of `statex` is `statex/table_3.yaml`.

    Raises:
        UserError: A file is missing, is of no table or figure in papers.yaml, or has a wrong key or value.
    """
    papers, expected_files = [], {folder / "papers.yaml"}
    for name, contents in read_yaml(folder / "papers.yaml", "reproductions").items():
        listing = _built(Listing, contents, f"papers.yaml: {name}")
        files = {item: folder / name / _file_name(item) for item in listing.items}
        if missing := [item for item, file in files.items() if not file.is_file()]:
            raise UserError(f"reproductions: {', '.join(missing)} of {name} has no row; write {files[missing[0]]}")
        rows = {
            item: _built(Row, read_yaml(file, "reproductions"), f"{name}/{file.name}") for item, file in files.items()
        }
        papers.append(Paper(listing, rows))
        expected_files |= {*files.values()}
    if strange := sorted({*folder.rglob("*.*")} - expected_files):
        raise UserError(f"reproductions: {strange[0]} is of no table or figure in {folder / 'papers.yaml'}")
    return papers


def _file_name(item: str) -> str:
    """Return the file name of a row: `table_s1.yaml` for "Table S.1"."""
    return f"{item.lower().replace('.', '').replace(',', '').replace(' ', '_')}.yaml"


def _built(kind: type, contents: Any, where: str) -> Any:
    """A dataclass from plain containers; an error message names the file."""
    parser = _parser(kind)
    try:
        with explained(parser):
            return parser.instantiate_classes(parser.parse_object({"row": contents})).row
    except UserError as error:
        raise UserError(f"reproductions: {where}: {str(error).replace('row.', '')}") from None


@functools.cache
def _parser(kind: type) -> Parser:
    parser = Parser()
    parser.add_class_arguments(kind, "row")
    return parser
