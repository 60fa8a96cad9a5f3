"""Tables, consoles and figures in one style, and names in arguments."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kernels import UserError
from zoo.arguments import check_names, names_in
from zoo.display import new_console, new_figure, new_table, progress_bar, short_list, write_figure


def test_a_table():
    table = new_table(["name", "size", "remark"], left=["name", "remark"], wrapped=["remark"], caption="In tokens.")
    table.add_row("a", "1", "fine")
    assert [column.justify for column in table.columns] == ["left", "right", "left"]
    assert [column.no_wrap for column in table.columns] == [True, True, False]
    (console := Console(file=io.StringIO(), width=40)).print(table)
    lines = console.file.getvalue().splitlines()
    assert next(line.split() for line in lines if line.strip()) == ["name", "size", "remark"]
    assert lines[-1].strip() == "In tokens."


def test_a_console_of_a_log_file_holds_a_wide_table(capsys: pytest.CaptureFixture[str]):
    new_console(width=150).print("x" * 140)
    assert capsys.readouterr().out == "x" * 140 + "\n"
    new_console(verbose=False).print("nothing")
    assert not capsys.readouterr().out


def test_a_bar_in_a_log_file_is_a_line_per_interval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # another test may have run a notebook
    for number in (bar := progress_bar(range(3), desc="evaluation", unit=" cells")):
        bar.set_description_str(f"evaluation {number}")
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith("evaluation: 0/3 cells, 00:00 passed, ")
    assert last.startswith("evaluation 2: 3/3 cells, 00:00 passed, ")
    monkeypatch.setattr("zoo.display.LOG_SECONDS", 0.0)
    for number in (bar := progress_bar(range(3), desc="evaluation", unit=" cells")):
        bar.set_description_str(f"evaluation {number}")
    assert len(shown := capsys.readouterr().err.splitlines()) >= 4
    assert not [line for line in shown if "\r" in line or not line.strip()]
    with progress_bar(total=10**6, initial=10, desc="tokenising") as bar:
        bar.update(9_000)
        bar.refresh()
        assert " ? left" in capsys.readouterr().err.splitlines()[-1]  # a hundredth is not done
        bar.update(2_000)
        bar.refresh()
        assert " ? left" not in capsys.readouterr().err.splitlines()[-1]
    with progress_bar(total=1, desc="tokenising", delay=60) as bar:
        bar.update()
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_a_figure_is_written_in_the_format_of_its_name(tmp_path: Path, name: str, start: bytes):
    figure = new_figure(2, 1)
    figure.add_subplot().plot([1, 2])
    write_figure(figure, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_list_in_a_line():
    assert short_list(["a", "b"]) == "a; b"
    assert short_list("abcdefg", most=2, separator=", ") == "a, b and 5 more"


def test_names():
    assert names_in("[a, b,]") == names_in(" a,b") == names_in(["a", "b"]) == ["a", "b"]
    assert names_in("gla.yaml, data.path=[x]") == ["gla.yaml", "data.path=[x]"]
    assert names_in(None) == []
    check_names("ops", ["a"], ["a", "b"])
    with pytest.raises(UserError, match=r"ops: 'alpa' is not one of alpha, beta; did you mean 'alpha'\?"):
        check_names("ops", ["alpha", "alpa"], ["alpha", "beta"])
