"""Check the files of a reported folder, which may come from someone else or be damaged."""

import base64
import csv
import io
import json
from typing import Any

from kernels import UserError
from zoo.files.safe_yaml import check_plain, dump_yaml, parse_yaml
from zoo.files.sealed_json import unsealed
from zoo.train.metrics_file import finite, is_number

Plain = dict[str, Any]
PNG, PNG_END = b"\x89PNG\r\n\x1a\n", b"\x00\x00\x00\x00IEND\xaeB`\x82"
NUMBERS = (
    *("val_loss", "val_perplexity", "val_accuracy", "bigram_loss", "parameters", "parameters_without_embeddings"),
    *("state_size", "training_flops_per_token", "tokens_seen", "tokens_per_second", "wall_seconds"),
)


def parse_results(data: bytes) -> Plain:
    """Return the row of a `results.json`.

    Raises:
        UserError: It is damaged, or holds something else where there must be a number.
    """
    row = unsealed(data, "results.json", advice="so there are no sizes and losses in the table")
    if "status" not in row:
        raise UserError("results.json has no status, so there are no sizes and losses in the table")
    row = {name: finite(value) for name, value in row.items()}
    for name in NUMBERS:
        if row.get(name) is not None and not is_number(row[name]):
            value = _short(row[name])
            raise UserError(f"results.json is damaged ({name} is {value}, not a number), so it is left out")
    return row


def parse_config(data: bytes) -> tuple[Plain, str]:
    """Return a run's config and the text of it that goes into the page.

    Raises:
        UserError: It is not text, not YAML or not a config.
    """
    try:
        config = parse_yaml(data.decode(), "config.yaml")
        check_plain(config, "config.yaml")
        if not isinstance(config, dict):
            raise UserError(f"config.yaml holds {_short(config)} instead of keys")
        return config, dump_yaml(config)
    except UnicodeDecodeError as error:
        raise UserError(f"config.yaml is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except ValueError as error:  # UserErrors among them; others are of hexadecimal numbers with thousands of digits
        raise UserError(str(error).rstrip(".")) from None


def parse_record(line: str) -> Plain:
    """Return a record of a `rows.jsonl`: what was measured, of which checkpoint, and the rows.

    Raises:
        ValueError: A part is missing, or something else than its type.
        RecursionError: It is nested too deeply.
    """
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get("what"), dict):
        raise ValueError("what: missing")
    what, rows, checkpoint = record["what"], record.get("rows"), record.get("checkpoint")
    names = isinstance(what.get("task"), str) and isinstance(checkpoint, str) and what["task"] and checkpoint
    groups = isinstance(what.get("options") or {}, dict) and isinstance(what.get("cell") or {}, dict)
    cell = (what.get("cell") or {}).values() if groups else ()
    scalars = all(is_number(value) or isinstance(value, str | None) for value in (*cell, what.get("precision")))
    scalars &= is_number(what.get("version", 1))
    if not names or not groups or not scalars or not isinstance(rows, list):
        raise ValueError("task, checkpoint, cell or options: wrong types")
    return {**record, "rows": [_parse_row(row) for row in rows]}


def _parse_row(row: Any) -> Plain:
    if not isinstance(row, dict) or "value" not in row or not isinstance(row.get("metric"), str):
        raise ValueError("a row has a metric and a value")
    row = {name: finite(value) for name, value in row.items()}
    for name, value in row.items():
        missing = value is None and name not in ("length", "depth", "position", "count")
        if name in ("value", "length", "depth", "position", "count", "low", "high", "stderr"):
            fine = missing or is_number(value)
        elif name in ("model", "subtask", "metric"):
            fine = isinstance(value, str)
        else:
            fine = missing or isinstance(value, str | bool) or is_number(value)
        if not fine or (name == "count" and value < 0):
            raise ValueError(f"{name}: wrong type")
    return row


def parse_sweep(data: bytes) -> tuple[list[Plain], list[int]]:
    """Return the rows of a `sweep.csv`, and the numbers of the lines that have too many fields or too few.

    Raises:
        UserError: It is not UTF-8 text or not CSV.
    """
    reader = None
    try:
        reader = csv.DictReader(io.StringIO(data.decode(), newline=""))
        rows, bad = [], []
        for row in reader:
            if None in row or None in row.values():
                bad.append(reader.line_num)
            else:
                rows.append(row)
    except UnicodeDecodeError as error:
        raise UserError(f"sweep.csv is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except csv.Error as error:
        line = reader.line_num if reader is not None else 0
        raise UserError(f"sweep.csv is damaged (after line {line}: {error})") from None
    return rows, bad


def parse_samples(data: bytes) -> str:
    """Return the text of a `samples.txt`; a last character of which a killed process wrote only a part is left out.

    Raises:
        UserError: It is not UTF-8 text.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return data[: error.start].decode()
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"samples.txt is not UTF-8 text (line {line}: {error.reason})") from None


def parse_picture(data: bytes) -> str:
    """Return the PNG of a sweep as a data URL; a UserError if it is not a PNG, or has something after its end."""
    if not (data.startswith(PNG) and data.endswith(PNG_END) and data.count(PNG_END) == 1):
        raise UserError("sweep.png is not a PNG, so it is not in this page")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1e300 else "a number with hundreds of digits"
    return text if len(text) <= 40 else f"{text[:40]}…"
