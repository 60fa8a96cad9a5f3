"""Runs of a scaling law in a CSV, one row for each run: those of other code bases, or of a study that is published."""

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kernels import UserError
from zoo.scaling.curves import Curve

REQUIRED = ("name", "mixers", "parameters_without_embeddings", "training_flops_per_token", "tokens", "train_loss")
OPTIONAL = ("learning_rate", "seed", "context_length", "data_hash")
HELP = "docs/scaling.md lists the columns"


def read_run_table(file: Path) -> list[tuple[dict[str, Any], Curve]]:
    """Return the settings and the training curve of each run in a CSV.

    `tokens` and `train_loss` hold as many numbers as the curve has points, separated by spaces, or one number each. A
    loss that is not a number marks a run that diverged. Columns beyond `REQUIRED` and `OPTIONAL` are ignored.

    Raises:
        UserError: The file is empty or not a CSV, lacks a column, or holds something else where there must be a number.
    """
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream)
            rows = [(reader.line_num, row) for row in reader]
            header = reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"runs: {file} cannot be read as a CSV in UTF-8: {error}") from None
    if missing := [column for column in REQUIRED if column not in header] if header else []:
        raise UserError(f"runs: {file} has no column {missing[0]!r}; {HELP}")
    if not rows:
        raise UserError(f"runs: {file} is empty; it needs a line with the columns and one for each run; {HELP}")
    runs: dict[str, tuple[dict[str, Any], Curve]] = {}
    for line, row in rows:
        where = f"runs: {file}, line {line}"
        if None in row or None in row.values():
            raise UserError(f"{where}: has {'more' if None in row else 'fewer'} fields than the {len(header)} columns")
        if row["name"] in runs:
            raise UserError(f"{where}: the name {row['name']!r} is that of an earlier run; names must differ")
        runs[row["name"]] = _settings(where, row), _curve(where, row, f"{file}: {row['name']}")
    return [*runs.values()]


def _settings(where: str, row: Mapping[str, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {name: row.get(name) or None for name in OPTIONAL}
    for name in ("learning_rate", "seed", "context_length"):
        if settings[name] is not None:
            (settings[name],) = _numbers(where, row, name, several=False)
    return settings


def _curve(where: str, row: Mapping[str, str], name: str) -> Curve:
    if not row["mixers"]:
        raise UserError(f"{where}: mixers is empty; name what the laws are compared by")
    (size,) = _numbers(where, row, "parameters_without_embeddings", several=False)
    (flops,) = _numbers(where, row, "training_flops_per_token", several=False)
    tokens, losses = np.array(_numbers(where, row, "tokens")), np.array(_numbers(where, row, "train_loss", nan=True))
    if len(tokens) != len(losses):
        raise UserError(f"{where}: tokens has {len(tokens)} numbers and train_loss {len(losses)}; give as many of both")
    if np.any(np.diff(tokens) <= 0):
        raise UserError(f"{where}: tokens must rise from each number to the next")
    return Curve(name, row["mixers"], size, flops, tokens, losses)


def _numbers(where: str, row: Mapping[str, str], name: str, several: bool = True, nan: bool = False) -> list[float]:
    """The positive numbers in a field; NaN for each that is none, if `nan`."""
    words = row[name].split() if several else [row[name]]
    numbers = []
    for word in words or [""]:
        try:
            number = float(word)
        except ValueError:
            number = -1.0
        if nan and not math.isfinite(number):
            number = math.nan
        elif not 0 <= number < math.inf or (number == 0 and name != "seed"):
            raise UserError(f"{where}: {name} is {word[:40]!r}, and must be a positive number; {HELP}")
        numbers.append(number)
    return numbers
