"""`reproductions/write_csv.py`: the table of a folder of runs has what `scaling fit` reads from the folder."""

import csv
from pathlib import Path

import numpy as np
import pytest

from reproductions import write_csv
from tests.zoo.scaling.curves import write_run
from zoo.scaling.runs import find_runs, select

MEASURED = Path(write_csv.__file__).parent / "measured"


def test_the_table_of_a_folder_of_runs(tmp_path: Path):
    for i, size in enumerate((1e8, 1e9)):
        write_run(tmp_path / "ladder" / f"run{i}", size)
    file = tmp_path / "ladder.csv"
    write_csv.write(write_csv.runs(tmp_path / "ladder"), file)
    of_table, of_folders = (select(find_runs([place]), {}) for place in (file, tmp_path / "ladder"))
    assert of_table.rates == of_folders.rates
    for run, expected in zip(of_table.runs, of_folders.runs, strict=True):
        assert run.curve.mixer == expected.curve.mixer
        assert np.array_equal(run.curve.flops, expected.curve.flops)
        assert np.array_equal(run.curve.losses, expected.curve.losses)


def test_nested_values_and_lists(tmp_path: Path):
    write_csv.write([dict(write_csv.flat({"a": {"b": 1, "c": [1, 2]}, "d": None}, "")), {"e": 0.1}], tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text() == "a.b,a.c,d,e\n1,1 2,,\n,,,0.1\n"


@pytest.mark.parametrize("file", sorted(MEASURED.glob("*.csv")), ids=lambda file: file.stem)
def test_a_table_has_a_value_or_an_empty_field_for_each_column(file: Path):
    with file.open(encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    assert rows
    assert len({*header}) == len(header)
    assert {len(row) for row in rows} == {len(header)}
