"""`evaluate` as a user meets it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_leaves

import zoo
from kernels import UserError
from tests.commands import Command
from zoo.evaluation.loaded import is_of_embedded_text
from zoo.evaluation.record import Records, locked
from zoo.evaluation.results import check_pictures, pictures, table
from zoo.evaluation.task import Options, interval
from zoo.evaluation.tasks import task_table, tasks_of
from zoo.evaluation.tasks.perplexity import Perplexity, ranges

OPTIONS = {"tasks": "perplexity", "lengths": [32, 96], "samples": 4, "device": "cpu"}


@pytest.fixture
def done(finished: Path, desk: Path) -> str:
    """The folder of a complete run, from an empty working directory."""
    return str(finished / "runs" / "done")


@pytest.mark.slow
def test_rows_table_and_pictures(done: str, command: Command, desk: Path) -> None:
    actual = command("evaluate", "--checkpoint", done, "--tasks=perplexity", "--lengths=[32,96]", "--samples=4").ok()
    assert "perplexity" in actual.out
    folder = desk / "evaluations" / "done"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "rows.jsonl",
        "perplexity.png",
        "perplexity.svg",
        "perplexity-position.png",
        "perplexity-position.svg",
    }
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert [line["what"]["cell"] for line in lines] == [{"length": 32, "tokens": 384}, {"length": 96, "tokens": 384}]
    for line in lines:
        assert line["what"]["checkpoint_xxh3_128"] == line["checkpoint_xxh3_128"]
        assert {"torch", "device", "seconds", "parameters", "model"} <= line.keys()
    by_position = [row["position"] for row in lines[1]["rows"] if "position" in row]
    assert by_position == [64, 96]


@pytest.mark.slow
def test_needles_that_were_never_trained(done: str, command: Command, desk: Path) -> None:
    shown = command("evaluate", "--checkpoint", done, "--tasks=passkey", "--lengths=[256]", "--samples=1").ok()
    hint = "done: trained on text without needles, which teaches no recall; train with --config data/needles.yaml"
    assert hint in shown.out.splitlines()
    shown = command("evaluate", "--checkpoint", done, "--tasks=mqar", "--lengths=[16]", "--samples=1")
    assert "done: trained on text, so that the random tokens of mqar mean nothing to it" in shown.out


@pytest.mark.parametrize(
    ("config", "certain"),
    [
        ({"data": {"class_path": "zoo.data.TextData", "init_args": {"path": None}}}, True),
        ({"data": {"class_path": "zoo.data.TextData", "init_args": {"path": "mine/"}}}, False),
        ({"data": {"class_path": "zoo.data.TextData"}, "optim": {"initial_weights": "runs/other"}}, False),
        ({"data": {"class_path": "zoo.data.MixedText", "init_args": {"sources": {"a": {"path": None}}}}}, True),
        (
            {
                "data": {
                    "class_path": "zoo.data.MixedText",
                    "init_args": {"sources": {"a": {}, "b": {"path": "synthetic:needles"}}},
                }
            },
            False,
        ),
        ({}, False),
    ],
)
def test_only_the_embedded_corpus_certainly_has_no_needles(config: dict, certain: bool) -> None:
    assert is_of_embedded_text(config) is certain


@pytest.mark.slow
def test_the_perplexity_is_that_of_all_its_tokens(done: str, desk: Path) -> None:
    rows = zoo.evaluate(done, **OPTIONS, verbose=False)
    for length in (32, 96):
        whole, *parts = [row for row in rows if row["length"] == length]
        count = sum(part["count"] for part in parts)
        assert count == whole["count"] == 4 * 96  # the same tokens for each length
        loss = sum(part["value"] * part["count"] for part in parts) / count
        assert whole["value"] == pytest.approx(2.718281828459045**loss, rel=1e-6)
        assert whole["low"] <= whole["value"] <= whole["high"]


@pytest.mark.slow
def test_several_models_side_by_side_and_nothing_measured_twice(
    done: str, desk: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = desk / "copy"
    assert command("export", "--checkpoint", done, "--output", str(other)).code == 0
    measured = []
    run = Perplexity.run
    monkeypatch.setattr(
        Perplexity, "run", lambda task, subject, cell: measured.append((subject.name, cell)) or run(task, subject, cell)
    )
    first = zoo.evaluate(done, **OPTIONS, output="both", verbose=False)
    assert len(measured) == 2
    with open("both/rows.jsonl", "a") as file:
        file.write('{"key": "half a li')  # as a killed process leaves it
    arguments = ["--checkpoint", done, "--checkpoint", "copy", "--tasks=perplexity", "--lengths=[32,96]", "--samples=4"]
    command("evaluate", *arguments, "--output=both", "--device=cpu").ok()
    assert [(name, cell["length"]) for name, cell in measured[2:]] == [("copy", 32), ("copy", 96)]
    lines = [json.loads(line) for line in Path("both/rows.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    assert [line["rows"] for line in lines[:2]] == [
        [{k: v for k, v in row.items() if k not in ("model", "task")} for row in first if row["length"] == length]
        for length in (32, 96)
    ]
    # the same weights in another file: another checkpoint with the same numbers
    assert [row["value"] for row in lines[2]["rows"]] == pytest.approx([row["value"] for row in lines[0]["rows"]])


@pytest.mark.slow
def test_a_cell_counts_whatever_else_was_evaluated(done: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = zoo.evaluate(done, **OPTIONS, output="out", verbose=False)
    monkeypatch.setattr(Perplexity, "run", lambda *inputs: pytest.fail("it was measured again"))
    assert zoo.evaluate(done, **{**OPTIONS, "lengths": [96]}, output="out", verbose=False) == both[2:]


@pytest.mark.slow
def test_a_task_of_another_version_is_measured_again(done: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.evaluate(done, **OPTIONS, output="out", verbose=False)
    monkeypatch.setattr(Perplexity, "version", 2)
    monkeypatch.setattr(Perplexity, "run", lambda task, subject, cell: [{**cell, "metric": "perplexity", "value": 1.0}])
    rows = zoo.evaluate(done, **OPTIONS, output="out", verbose=False)
    assert [(row["length"], row["value"]) for row in rows] == [(32, 1.0), (96, 1.0)], "no row of version 1"
    lines = [json.loads(line) for line in Path("out/rows.jsonl").read_text().splitlines()]
    assert [line["what"].get("version", 1) for line in lines] == [1, 1, 2, 2]


@pytest.mark.slow
def test_a_pattern_stands_for_its_checkpoints(done: str, desk: Path) -> None:
    for name in ("mixer=a,seed=0", "mixer=b,seed=0"):
        shutil.copytree(done, desk / "runs" / name)
    rows = zoo.evaluate("runs/mixer=*", **OPTIONS, output="out", verbose=False)
    assert list(dict.fromkeys(row["model"] for row in rows)) == ["mixer=a,seed=0", "mixer=b,seed=0"]
    long = "a-name-of-forty-characters-and-some-more"
    for number in range(3):
        shutil.copytree(done, desk / "runs" / f"{long}-{number:02}")
    zoo.evaluate("runs/a-*", "perplexity", lengths=[32], samples=1, device="cpu", verbose=False)
    assert [path.name for path in Path("evaluations").iterdir()] == [f"{long}-00+2-more"]
    with pytest.raises(UserError, match="checkpoint: nothing matches runs/other"):
        zoo.evaluate("runs/other*", **OPTIONS)


@pytest.mark.slow
def test_seeds_are_shown_as_one_model(done: str, desk: Path, command: Command) -> None:
    for name in ("mixer=a,seed=0", "mixer=a,seed=1", "mixer=b,seed=0"):
        shutil.copytree(done, desk / "runs" / name)
    options = ["--tasks=perplexity", "--lengths=[32,96]", "--samples=4", "--device=cpu", "--output=out"]
    actual = command("evaluate", "--checkpoint=runs/mixer=*", *options, "--average_seeds=true").ok()
    assert re.findall(r"mixer=\w\S*", actual.out) == ["mixer=a", "mixer=b"]
    rows = zoo.evaluate("runs/mixer=*", **OPTIONS, output="out", average_seeds=True, verbose=False)
    assert {row["model"] for row in rows} == {"mixer=a,seed=0", "mixer=a,seed=1", "mixer=b,seed=0"}


def test_a_table_shows_some_of_many_lengths() -> None:
    rows = [
        {"model": "m", "metric": "accuracy", "value": length / 35000, "length": length}
        for length in range(0, 35000, 1000)
    ]
    shown = table(Perplexity(Options()), [*rows, {"model": "m", "metric": "niah_score", "value": 0.5}])
    headings = ["0", "5000", "10000", "15000", "19000", "24000", "29000", "34000"]
    assert [column.header for column in shown.columns] == ["model", "metric", *headings, "all"]
    assert "columns: length, some of 35; the files have all" in str(shown.caption)
    assert len(table(Perplexity(Options()), rows[:12]).columns) == 2 + 12


def test_many_heatmaps_are_in_several_rows() -> None:
    cells = [{"length": length, "depth": depth} for length in (64, 128) for depth in (0.0, 0.5, 1.0)]
    rows = [
        {"model": f"model {n}", "metric": "accuracy", "value": n / 10, "count": 5, **cell}
        for n in range(11)
        for cell in cells
    ]
    task = Perplexity(Options())
    picture = pictures(task, rows)["perplexity-depth"]
    panels = [panel for panel in picture.axes if panel.images]
    assert [panel.get_title() for panel in panels] == [f"model {n}" for n in range(11)]
    assert [float(panel.images[0].get_array().mean()) for panel in panels] == pytest.approx([n / 10 for n in range(11)])
    assert len({round(panel.get_position().y0, 3) for panel in panels}) == 2
    lines = {(line.get_color(), line.get_linestyle()) for line in pictures(task, rows)["perplexity"].axes[0].lines}
    assert len(lines) >= 11  # more models than colours: no two look alike


def test_the_list_of_tasks(command: Command) -> None:
    actual = command("evaluate", "--tasks=list").ok()
    assert "perplexity" in actual.out
    assert "a tokenizer" in actual.out


def lines(shown: Table) -> list[str]:
    """What a terminal of 100 columns shows."""
    console = Console(width=100)
    with console.capture() as captured:
        console.print(shown)
    return [line.strip() for line in captured.get().splitlines()]


def test_nothing_is_cut_off_or_torn_at_100_columns() -> None:
    assert not [line for line in lines(task_table()) if re.search(r"\w…", line)]
    passkey = tasks_of(["passkey"], Options())[0]
    row = {"model": "first", "metric": "accuracy", "length": 256, "value": 0.5, "count": 4}
    assert lines(table(passkey, [row]))[-2:] == ["columns: length", "accuracies in %"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "perplexty"}, "tasks: 'perplexty' is not a task; did you mean 'perplexity'"),
        ({"lengths": [0]}, "lengths: 0 must be at least 1"),
        ({"lengths": [10_000_000]}, "lengths: 10000000 tokens are more than the"),
        ({"samples": 0}, "samples: 0 must be at least 1"),
        ({"depths": [1.5]}, "depths: 1.5 is not between"),
        ({"precision": "8-bit"}, "precision: '8-bit' is not one of 32-true, bf16-mixed"),
        ({"batch_tokens": 0}, "batch_tokens: 0 must be at least 1"),
        ({"held_out": 0.0}, "held_out: 0.0 is not a fraction above 0"),
        ({"haystack": "nowhere.txt"}, "nowhere.txt"),
        ({"device": "gpu"}, "device: 'gpu' is not one of cpu, cuda"),
    ],
)
def test_mistakes_are_told_before_anything_runs(done: str, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        zoo.evaluate(done, **{**OPTIONS, **options})
    assert not Path("evaluations").exists()


@pytest.mark.parametrize("name", ["perplexity.png", "perplexity-position.svg"])
def test_pictures_of_somebody_else_are_kept(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("years of work")
    tasks = tasks_of(["perplexity"], Options())
    with pytest.raises(UserError, match=f"output: .*{name} exists, but the folder has no rows.jsonl, so it is not"):
        check_pictures(tasks, tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"key": "of a record"}\n')
    check_pictures(tasks, tmp_path)


@pytest.mark.parametrize("content", ['{"km": 5}', '{"key', "5\n"])
def test_rows_of_somebody_else_are_kept(tmp_path: Path, content: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    if content == '{"key':  # half of a line that an evaluation was writing
        assert not Records(tmp_path).find({})
        content = ""
    else:
        with pytest.raises(UserError, match=r"output: line 1 of .*rows.jsonl is .*; remove it and the pictures in its"):
            Records(tmp_path)
    assert (tmp_path / "rows.jsonl").read_text() == content


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        (["decoding"], {"haystack": "/no/such/file"}, r"haystack: none of the tasks uses it \(decoding\)"),
        (["s_niah_1", "passkey"], {"haystack": "a.txt"}, r"haystack: none .* \(s_niah_1, passkey\); leave it out"),
        (["perplexity"], {"depths": (0.5,)}, "depths: none of the tasks uses it"),
        (["perplexity"], {"data": "benchmarks/"}, "data: none of the tasks uses it"),
    ],
)
def test_an_option_that_no_task_uses(tasks: list[str], options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        tasks_of(tasks, Options(**options))
    tasks_of([*tasks, "s_niah_2", "perplexity"], replace(Options(**options), data=None))


def test_no_checkpoint() -> None:
    with pytest.raises(UserError, match="checkpoint: evaluate needs one"):
        zoo.evaluate(tasks="perplexity")


@pytest.mark.slow
def test_a_damaged_line_is_named(done: str, desk: Path) -> None:
    zoo.evaluate(done, **OPTIONS, output="out", verbose=False)
    file = Path("out/rows.jsonl")
    file.write_text(file.read_text().replace('"length": 32', '"length": 33', 1))
    with pytest.raises(UserError, match=r"output: line 1 of out/rows\.jsonl is damaged"):
        zoo.evaluate(done, **OPTIONS, output="out", verbose=False)


@pytest.mark.parametrize("line", ["[]", '{"key": 1}', '"key what rows"', "null"])
def test_a_line_that_is_not_a_record_is_named(line: str, done: str, desk: Path) -> None:
    Path("out").mkdir()
    Path("out/rows.jsonl").write_text(f"{line}\n")
    sentence = r"line 1 of out/rows\.jsonl is damaged \(it is not an object with key, what and rows\)"
    with pytest.raises(UserError, match=sentence):
        zoo.evaluate(done, **OPTIONS, output="out", verbose=False)
    assert Path("out/rows.jsonl").read_text() == f"{line}\n"


ROW = {"length": 32, "metric": "accuracy", "value": 0.5, "count": 4}
WRONG_ROWS: dict[str, object] = {
    "value is a string": ROW | {"value": "high"},
    "value is a list": ROW | {"value": [0.5]},
    "value of 400 digits": ROW | {"value": 10**400},
    "length is a string": ROW | {"length": "256"},
    "length is null": ROW | {"length": None},
    "length is infinite": ROW | {"length": float("inf")},
    "depth is a list": ROW | {"depth": [0.5]},
    "count is negative": ROW | {"count": -4},
    "count is a string": ROW | {"count": "4"},
    "metric is a number": ROW | {"metric": 3},
    "metric is a list": ROW | {"metric": ["accuracy"]},
    "subtask is an object": ROW | {"subtask": {}},
    "no value": {"metric": "accuracy"},
    "a number": 3,
    "empty": {},
}


@pytest.mark.slow
def test_rows_of_wrong_types_are_named(done: str, desk: Path) -> None:
    """Of a stranger, who can write a key that belongs to what was measured."""
    zoo.evaluate(done, **OPTIONS, output="out", verbose=False)
    file = Path("out/rows.jsonl")
    first, *others = file.read_text().splitlines()
    for row in WRONG_ROWS.values():
        file.write_text("\n".join([json.dumps({**json.loads(first), "rows": [row]}), *others]) + "\n")
        with pytest.raises(UserError, match=r"output: line 1 of out/rows\.jsonl is damaged \(.* row .*\); remove it"):
            zoo.evaluate(done, **OPTIONS, output="out", verbose=False)


@pytest.mark.slow
def test_two_processes_do_not_write_to_one_folder(done: str, desk: Path) -> None:
    zoo.evaluate(done, **OPTIONS, output="out", verbose=False)
    with open("out/rows.jsonl", "a") as file:
        file.write('{"key": "which the other process is wri')
    before = Path("out/rows.jsonl").read_bytes()
    with locked(Path("out")), pytest.raises(UserError, match="output: another process is evaluating into out"):
        zoo.evaluate(done, **OPTIONS, output="out", verbose=False)
    assert Path("out/rows.jsonl").read_bytes() == before
    Path("file").touch()
    with pytest.raises(UserError, match="output: the folder file/out cannot be created"):
        zoo.evaluate(done, **OPTIONS, output="file/out", verbose=False)


@pytest.mark.slow
def test_throughput(done: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reproductions.throughput.SECONDS", 0.05)
    task = "reproductions.throughput.Throughput"
    rows = zoo.evaluate(done, task, lengths=[16, 32], device="cpu", batch_tokens=64, verbose=False, output="speed")
    kinds = ["training_tokens_per_second", "prefill_tokens_per_second", "decode_tokens_per_second"]
    assert [(row["length"], row["batch_size"], row["metric"]) for row in rows] == [
        (length, 64 // length, kind) for length in (16, 32) for kind in kinds
    ]
    assert all(row["value"] > 0 for row in rows)
    assert Path("speed/throughput.png").exists()


@pytest.mark.slow
def test_an_overview_of_models_and_tasks(
    done: str, command: Command, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zoo.evaluation.tasks.decoding.SECONDS", 0.05)
    shutil.copytree(done, "other")
    shown = command(
        *("evaluate", "--checkpoint", done, "--checkpoint=other", "--tasks=perplexity,decoding"),
        *("--lengths=[32,96]", "--samples=4", "--device=cpu", "--output=both"),
    ).ok()
    lines = [line.split() for line in shown.out.partition("overview")[2].splitlines()]
    assert ["task", "metric", "at", "done", "other"] in lines
    places = [line[:-2] for line in lines if line[:1] in (["perplexity"], ["decoding"])]
    assert places == [
        [task, *metric.split(), length]
        for task, metric in (("perplexity", "perplexity"), ("decoding", "ms per token"), ("decoding", "state mib"))
        for length in ("32", "96")
    ]
    rows = [row for line in Path("both/rows.jsonl").read_text().splitlines() for row in json.loads(line)["rows"]]
    model = zoo.load(done)
    for row in rows:
        if row["metric"] == "state_mib":
            state = model(torch.zeros(1, row["length"], dtype=torch.int64), model.init_state(1))[1]
            assert row["value"] == pytest.approx(sum(leaf.nbytes for leaf in tree_leaves(state)) / 2**20)
    assert Path("both/overview.png").exists()
    (desk / "mine").mkdir()
    (desk / "mine" / "overview.png").touch()
    with pytest.raises(UserError, match=r"output: .*overview.png exists, but the folder has no"):
        zoo.evaluate([done, "other"], ["perplexity", "decoding"], output="mine", verbose=False)


def test_intervals() -> None:
    low, high = interval(50, 100)
    assert (low, high) == pytest.approx((0.4038, 0.5962), abs=1e-4)  # Wilson (1927), as tabulated
    assert interval(0, 10)[0] == pytest.approx(0)
    assert 0.25 < interval(0, 10)[1] < 0.3
    assert interval(10, 10)[1] == pytest.approx(1)


@pytest.mark.parametrize(("length", "ends"), [(32, [32]), (64, [64]), (300, [64, 128, 256, 300])])
def test_ranges_of_positions(length: int, ends: list[int]) -> None:
    assert [end for _, end in ranges(length)] == ends
    assert [start for start, _ in ranges(length)] == [0, *ends[:-1]]
