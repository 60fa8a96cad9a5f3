"""Reports on damaged and hostile folders: a page, or one sentence, and nothing from outside the folders."""

import html
import json
import os
from pathlib import Path
from typing import Any

import pytest

import zoo
from zoo.files.sealed_json import sealed

pytest.importorskip("bokeh")
pytest_plugins = "tests.desk"

ROW = {"step": 1, "tokens": 64.0, "train_loss": 2.5}
RESULTS = {"run": "r", "status": "complete", "val_loss": 2.0, "parameters": 9000, "wall_seconds": 60.0}
CELL = {"length": 256, "depth": 0.5, "metric": "accuracy", "value": 0.5, "count": 4}
WHAT = {"task": "passkey", "cell": {"length": 256}, "options": {"samples": 4}}
CSV = "name,seed,status,parameters,val_loss\n"
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154"
    "78da63f8cfc000000301010018dd8db00000000049454e44ae426082"
)


def metrics(**changes: Any) -> tuple[str, str]:
    return "runs/r/metrics.jsonl", json.dumps(ROW) + "\n" + json.dumps(ROW | {"step": 2} | changes) + "\n"


def results(**changes: Any) -> tuple[str, bytes]:
    return "runs/r/results.json", sealed(RESULTS | changes)


def record(**changes: Any) -> tuple[str, str]:
    lines = ({"what": WHAT, "rows": [CELL], "checkpoint": "runs/r"}, {"what": WHAT, "rows": [CELL], "checkpoint": "r"})
    return "evaluations/e/rows.jsonl", "".join(json.dumps(line | changes) + "\n" for line in lines)


def measured(**changes: Any) -> tuple[str, str]:
    return record(rows=[CELL, CELL | {"length": 512}, CELL | changes])


def sweep(text: str | bytes) -> tuple[str, str | bytes]:
    return "sweeps/s/sweep.csv", text


MALFORMED = {
    "metrics: loss is a string": metrics(train_loss="2.5"),
    "metrics: loss is a list": metrics(train_loss=[1, 2]),
    "metrics: loss is an object": metrics(train_loss={"a": 1}),
    "metrics: loss is true": metrics(train_loss=True),
    "metrics: loss is NaN": metrics(train_loss=float("nan")),
    "metrics: loss is infinite": metrics(train_loss=float("inf")),
    "metrics: loss beyond fp64": ("runs/r/metrics.jsonl", '{"step": 1, "tokens": 1, "train_loss": 1e999}\n'),
    "metrics: loss beyond fp32": metrics(train_loss=1e200),
    "metrics: loss of 400 digits": metrics(train_loss=10**400),
    "metrics: tokens are a string": metrics(tokens="many"),
    "metrics: tokens are negative": metrics(tokens=-1),
    "metrics: step is infinite": metrics(step=float("inf")),
    "metrics: step is NaN": metrics(step=float("nan")),
    "metrics: step is negative": metrics(step=-5),
    "metrics: step is huge": metrics(step=10**400),
    "metrics: step is a fraction": metrics(step=1.5),
    "metrics: step is a string": metrics(step="2"),
    "metrics: step is a list": metrics(step=[2]),
    "metrics: step is null": metrics(step=None),
    "metrics: no step": ("runs/r/metrics.jsonl", '{"train_loss": 1}\n'),
    "metrics: a list": ("runs/r/metrics.jsonl", "[1, 2]\n"),
    "metrics: a string": ("runs/r/metrics.jsonl", '"step"\n'),
    "metrics: a truncated line": ("runs/r/metrics.jsonl", '{"step": 1, "tokens": 64.0, "train_lo'),
    "metrics: deep nesting": ("runs/r/metrics.jsonl", "[" * 100_000 + "]" * 100_000),
    "metrics: UTF-16": ("runs/r/metrics.jsonl", json.dumps(ROW).encode("utf-16")),
    "metrics: bytes": ("runs/r/metrics.jsonl", bytes(range(256))),
    "results: loss is a string": results(val_loss="low"),
    "results: loss is a list": results(val_loss=[1]),
    "results: parameters of 400 digits": results(parameters=10**400),
    "results: seconds are a string": results(wall_seconds="long"),
    "results: seconds are an object": results(wall_seconds={}),
    "results: accuracy is an object": results(val_accuracy={"a": 1}),
    "results: status is a list": results(status=["complete"]),
    "results: mixers are a number": results(mixers=3),
    "results: device is nested": results(device={"a": [{"b": None}]}),
    "results: half of a surrogate pair": results(device="\ud800"),
    "results: versions are a list": results(torch=[2, 11]),
    "results: a list": ("runs/r/results.json", "[]"),
    "results: truncated": ("runs/r/results.json", '{"status": "comp'),
    "results: no status": ("runs/r/results.json", "{}"),
    "results: UTF-16": ("runs/r/results.json", '{"status": 1}'.encode("utf-16")),
    "results: deep nesting": ("runs/r/results.json", "[" * 100_000),
    "rows: value is a string": measured(value="high"),
    "rows: value is a list": measured(value=[0.5]),
    "rows: value is infinite": measured(value=float("inf")),
    "rows: value is NaN": measured(value=float("nan")),
    "rows: value of 400 digits": measured(value=10**400),
    "rows: length is a string": measured(length="256"),
    "rows: length is null": measured(length=None),
    "rows: length is infinite": measured(length=float("inf")),
    "rows: depth is a list": measured(depth=[0.5]),
    "rows: count is negative": measured(count=-4),
    "rows: counts are zero": record(rows=[CELL | {"count": 0}]),
    "rows: count is a string": measured(count="4"),
    "rows: metric is a number": measured(metric=3),
    "rows: metric is a list": measured(metric=["accuracy"]),
    "rows: model is a list": measured(model=["r"]),
    "rows: subtask is an object": measured(subtask={}),
    "rows: axis is a number and a string": record(rows=[CELL | {"size": 1}, CELL | {"size": "1"}]),
    "rows: axis is true": record(rows=[CELL | {"size": True}]),
    "rows: depths that print alike": record(rows=[CELL, CELL | {"depth": 0.500000001}]),
    "rows: a line without values": record(
        rows=[{"n": n, "metric": "a", "value": n, "subtask": "x"} for n in (1, 2)]
        + [{"n": 1, "metric": "a", "value": None, "subtask": "y"}]
    ),
    "rows: a row is a number": record(rows=[3]),
    "rows: a row is empty": record(rows=[{}]),
    "rows: rows are an object": record(rows={}),
    "rows: task is a list": record(what=WHAT | {"task": ["passkey"]}),
    "rows: task is an object": record(what=WHAT | {"task": {"a": 1}}),
    "rows: no task": record(what={}),
    "rows: what is a list": record(what=[1]),
    "rows: options are a list": record(what=WHAT | {"options": [1]}),
    "rows: cell is null": record(what=WHAT | {"cell": None}),
    "rows: cell is a list": record(what=WHAT | {"cell": ["length"]}),
    "rows: length of a cell is a list": record(what=WHAT | {"cell": {"length": [1]}}),
    "rows: lengths of cells are a string and a number": (
        "evaluations/e/rows.jsonl",
        record(what=WHAT | {"cell": {"length": "a"}})[1] + record()[1],
    ),
    "rows: checkpoint is a number": record(checkpoint=3),
    "rows: checkpoint is null": record(checkpoint=None),
    "rows: truncated": ("evaluations/e/rows.jsonl", record()[1][:-30]),
    "rows: deep nesting": ("evaluations/e/rows.jsonl", "[" * 100_000),
    "rows: UTF-16": ("evaluations/e/rows.jsonl", record()[1].encode("utf-16")),
    "sweep: parameters of 400 digits": sweep(CSV + f"a,0,complete,{10**400},2\n"),
    "sweep: loss is infinite": sweep(CSV + "a,0,complete,9,1e999\n"),
    "sweep: loss is text": sweep(CSV + "a,0,complete,9,low\n"),
    "sweep: too many fields": sweep(CSV + "a,0,complete,9,2,3,4\n"),
    "sweep: too few fields": sweep(CSV + "a\nb,0,complete,9,2\n"),
    "sweep: a field without an end": sweep(CSV + 'a,"0,complete\n' * 3),
    "sweep: a huge field": sweep(CSV + "a" * 200_000 + ",0,complete,9,2\n"),
    "sweep: zero bytes": sweep((CSV + "a,\0,complete,9,2\n").encode()),
    "sweep: UTF-16": sweep(CSV.encode("utf-16")),
    "sweep: empty": sweep(""),
    "sweep: no header that is known": sweep("a\n1\n"),
    "config: a list": ("runs/r/config.yaml", "[1, 2]"),
    "config: a string": ("runs/r/config.yaml", "text"),
    "config: empty": ("runs/r/config.yaml", ""),
    "config: a date": ("runs/r/config.yaml", "a: 2024-01-01\n"),
    "config: bytes": ("runs/r/config.yaml", "a: !!binary aGVsbG8=\n"),
    "config: a set": ("runs/r/config.yaml", "a: !!set {b, c}\n"),
    "config: a Python object": ("runs/r/config.yaml", "a: !!python/object/apply:os.getcwd []\n"),
    "config: keys that are no strings": ("runs/r/config.yaml", "1: 2\n2.5: {true: 3, null: 4}\n"),
    "config: a number of 9,000 hexadecimal digits": ("runs/r/config.yaml", f"a: 0x{'f' * 9000}\n"),
    "config: half of a surrogate pair": ("runs/r/config.yaml", 'a: "\\ud800"\n'),
    "config: deep nesting": ("runs/r/config.yaml", "a: " + "[" * 5000),
    "config: aliases that explode": (
        "runs/r/config.yaml",
        "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
    ),
    "config: UTF-16": ("runs/r/config.yaml", "a: 1\n".encode("utf-16")),
    "config: Latin-1": ("runs/r/config.yaml", "a: \xfc\n".encode("latin-1")),
    "config: broken YAML": ("runs/r/config.yaml", "a: [1\nb: {"),
    "samples: bytes": ("runs/r/samples.txt", "── sample after 4 steps ──\n".encode() + bytes(range(128, 256))),
    "samples: without an end": ("runs/r/samples.txt", "── sample after 4 steps ──\nfoo …".encode()[:-1]),
    "samples: no step": ("runs/r/samples.txt", "── sample after "),
    "samples: endless": ("runs/r/samples.txt", "── sample after 4 steps ──\n" + "x" * 400_000),
    "picture: text": ("sweeps/s/sweep.png", "secret"),
    "picture: a picture and more": ("sweeps/s/sweep.png", PIXEL + b"secret" + PIXEL[-12:]),
}
LEFT_OUT = {  # of some: the sentence in the page
    "metrics: step is infinite": "runs/r: metrics.jsonl has damaged lines, which are left out: 2.",
    "metrics: loss is a string": "runs/r: metrics.jsonl has damaged lines, which are left out: 2.",
    "results: seconds are a string": "runs/r: results.json is damaged (wall_seconds is 'long', not a number), so",
    "results: truncated": "runs/r: results.json is damaged (it is not JSON: Unterminated string starting at: line 1",
    "rows: value is a string": "evaluations/e: rows.jsonl has damaged lines, which are left out: 1, 2.",
    "sweep: too many fields": "sweeps/s: sweep.csv has damaged lines, which are left out: 2.",
    "sweep: a huge field": "sweeps/s: sweep.csv is damaged (after line 1: field larger than field limit (131072)).",
    "config: a date": "runs/r: config.yaml holds a date, which does not belong in a config.",
    "config: broken YAML": "line 2, column 2",
    "samples: bytes": "runs/r: samples.txt is not UTF-8 text (line 2: invalid start byte).",
    "picture: text": "sweeps/s: sweep.png is not a PNG, so it is not in this page.",
}


@pytest.fixture
def folders(desk: Path) -> list[str]:
    """A run, an evaluation and a sweep of two runs, all of them well."""
    for folder in ("runs/r", "sweeps/s/a", "sweeps/s/b", "evaluations/e"):
        (desk / folder).mkdir(parents=True)
    for run in ("runs/r", "sweeps/s/a", "sweeps/s/b"):
        (desk / run / "config.yaml").write_text("model: {hidden_size: 32}\n")
        (desk / run / "results.json").write_bytes(sealed(RESULTS))
        (desk / run / "metrics.jsonl").write_text(metrics()[1])
        (desk / run / "samples.txt").write_text("── sample after 4 steps ──\nfoo\n")
    (desk / "evaluations/e/rows.jsonl").write_text(record()[1])
    (desk / "sweeps/s/sweep.csv").write_text(CSV + "a,0,complete,9000,2.0\nb,1,complete,9000,2.1\n")
    (desk / "sweeps/s/sweep.png").write_bytes(PIXEL)
    return ["runs/r", "sweeps/s", "evaluations/e"]


def words(page: Path) -> str:
    return html.unescape(page.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_left_out_and_named(command, folders: list[str], case: str):
    name, content = MALFORMED[case]
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    folder = next(folder for folder in folders if name.startswith(folder))
    done = command("report", folder, "--output", "page.html")
    assert "Traceback" not in done.err
    assert "Error" not in done.err
    assert done.code == 0, done.err
    page = words(Path("page.html"))
    assert page.startswith("<!DOCTYPE html>")
    assert page.rstrip().endswith("</html>")
    assert "secret" not in page
    assert LEFT_OUT.get(case, "") in page
    if case in LEFT_OUT:
        assert name.rpartition("/")[2] in done.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["config.yaml", "results.json", "metrics.jsonl", "samples.txt", "rows.jsonl", "sweep.csv", "sweep.png"]
)
def test_links_are_not_followed(command, folders: list[str], desk: Path, name: str):
    file = next(Path(folder) / name for folder in folders if (Path(folder) / name).exists())
    private = desk / "private"
    private.write_bytes(file.read_bytes().replace(b"foo", b"secret").replace(b"model", b"secret"))
    file.unlink()
    file.symlink_to(private)
    done = command("report", *folders, "--output", "page.html")
    assert done.code == 0, done.err
    assert f"{file.parent}: {name} is a link, so it is not in this page." in words(Path("page.html"))
    assert "secret" not in words(Path("page.html"))


@pytest.mark.slow
def test_runs_of_a_sweep_that_are_links_are_left_out(folders: list[str], desk: Path):
    (desk / "sweeps/s/b").rename(desk / "private")
    (desk / "private/samples.txt").write_text("── sample after 4 steps ──\nsecret\n")
    (desk / "sweeps/s/b").symlink_to(desk / "private")
    page = words(zoo.report("sweeps/s", verbose=False))
    assert "sweeps/s/b: a link, which is not followed" in page
    assert "secret" not in page


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
def test_a_pipe_does_not_wait_for_a_writer(folders: list[str], desk: Path):
    (desk / "runs/r/results.json").unlink()
    os.mkfifo(desk / "runs/r/results.json")
    assert "results.json is a pipe, not a regular file" in words(zoo.report("runs/r", verbose=False))


EVIL = "</script></pre><img src=x onerror=alert(1)>\"'><b>{{7*7}}"


def test_hostile_strings_are_text(folders: list[str]):
    run = Path("runs/r")
    (run / "config.yaml").write_text(json.dumps({EVIL: EVIL, "model": {"mixer": EVIL}}))
    (run / "results.json").write_bytes(sealed(dict.fromkeys(("status", "device", "mixers", "torch", "commit"), EVIL)))
    (run / "samples.txt").write_text(f"── sample after {EVIL} steps ──\n{EVIL}\n")
    cells = [CELL | {"metric": EVIL, "subtask": EVIL, "length": n, EVIL: n} for n in (1, 2)]
    what = {"task": EVIL, "options": {EVIL: EVIL}, "precision": EVIL}
    rows = [{"what": what, "rows": cells, "checkpoint": EVIL}, {"what": WHAT, "rows": [CELL], "checkpoint": EVIL}]
    Path("evaluations/e/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("sweeps/s/sweep.csv").write_text(
        f"name,{EVIL.replace(chr(34), '')},status\na,{EVIL.replace(chr(34), '')},ok\n"
    )
    zoo.report(folders, "page.html", title=EVIL, verbose=False)
    page = Path("page.html").read_text()
    assert "49" not in page[: page.index("</title>")]  # no template is filled in
    assert "<img src=x" not in page
    assert "<b>{{" not in page
    assert page.count("</script>") == page.count("<script")


def test_names_of_files_are_no_commands_to_the_terminal(command, desk: Path):
    (desk / "\x1b[2J\x1b]0;owned\x07").mkdir()
    next(desk.glob("*owned*")).joinpath("config.yaml").write_text("a: 1\n")
    done = command("report", next(desk.glob("*owned*")).name)
    assert done.code == 0, done.err
    assert "\x1b[2J" not in done.out
    assert "\x1b]0" not in done.out
