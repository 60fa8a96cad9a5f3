"""Runs in processes: skipped, continued, retried, stopped. `fake_fit.py` stands in for `cli.py fit`."""

import csv
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kernels import UserError
from tests.forked_python import forked_python
from zoo.experiments import Failure, Gate, Run, Runner, Sweep, results
from zoo.files.sealed_json import read_sealed, write_sealed

FAKE = [sys.executable, str(Path(__file__).with_name("fake_fit.py"))]
SWEEP = Sweep(
    "gated_deltanet.yaml", axes={"model.stack.mixer.factor": [1, 2, 4]}, seeds=[0, 1], x="state_size", lines=[]
)
ALL = [f"factor={factor},seed={seed}" for factor in (1, 2, 4) for seed in (0, 1)]


@functools.cache
def runs() -> list[Run]:
    return SWEEP.runs()


def calls(folder: Path) -> list[str]:
    return (folder / "calls.txt").read_text().splitlines()


@pytest.mark.slow
def test_every_run_once_and_nothing_twice(tmp_path: Path):
    runner = Runner(FAKE, tmp_path, jobs=3)
    assert runner.run(runs()) == []
    assert sorted(calls(tmp_path)) == sorted(f"--run {name}" for name in ALL)
    assert runner.run(runs()) == []
    assert len(calls(tmp_path)) == len(ALL)


@pytest.mark.slow
def test_a_failure_does_not_stop_the_others_and_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / f"{ALL[1]}.fails").touch()
    failures = Runner(FAKE, tmp_path, jobs=2).run(runs())
    assert f"{ALL[1]} failed: exit code 1, see" in "".join(capsys.readouterr())
    assert failures == [Failure(ALL[1], f"exit code 1, see {tmp_path / ALL[1]}.log")]
    assert "something broke" in (tmp_path / f"{ALL[1]}.log").read_text()
    assert len(calls(tmp_path)) == len(ALL)
    (tmp_path / f"{ALL[1]}.fails").unlink()
    assert Runner(FAKE, tmp_path).run(runs()) == []
    assert calls(tmp_path)[len(ALL) :] == [f"--run {ALL[1]}"]


@pytest.mark.slow
def test_another_config_under_the_same_name_is_refused(tmp_path: Path):
    Runner(FAKE, tmp_path).run(runs())
    with pytest.raises(UserError, match=r"seed=0 is a run with trainer.max_steps: 600, and now it is 9; delete it"):
        Runner(FAKE, tmp_path).run(SWEEP.runs(("trainer.max_steps=9",)))


@pytest.mark.slow
def test_runs_from_before_a_key_existed_are_the_same(tmp_path: Path):
    Runner(FAKE, tmp_path).run(runs())
    file = tmp_path / "runs.json"
    recorded = {name: {k: v for k, v in config.items() if k != "samples"} for name, config in read_sealed(file).items()}
    for config in recorded.values():
        assert config["model"].pop("embedding_norm") is False
    write_sealed(file, recorded)
    assert Runner(FAKE, tmp_path).run(runs()) == []
    assert len(calls(tmp_path)) == len(ALL)
    write_sealed(file, recorded)
    with pytest.raises(UserError, match=r"seed=0 is a run with model.embedding_norm: False, and now it is True"):
        Runner(FAKE, tmp_path).run(SWEEP.runs(("model.embedding_norm=true",)))


def test_a_folder_in_use(tmp_path: Path):
    runner = Runner(FAKE, tmp_path)
    with runner.claimed([]), pytest.raises(UserError, match="is in use by another process"):
        Runner(FAKE, tmp_path).run(runs())


def test_a_run_that_is_a_link_is_not_continued(tmp_path: Path):
    (tmp_path / "elsewhere" / "checkpoints").mkdir(parents=True)
    (tmp_path / ALL[0]).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=f"{ALL[0]} is a link, through which nothing is written"):
        Runner(FAKE, tmp_path).run(runs()[:1])


def test_no_jobs(tmp_path: Path):
    with pytest.raises(UserError, match="jobs: 0 must be at least 1"):
        Runner(FAKE, tmp_path, jobs=0)


@pytest.mark.slow
@pytest.mark.parametrize("start", [forked_python, pytest.param(lambda: sys.executable, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_stopped_in_the_middle_then_called_again(
    tmp_path: Path, number: signal.Signals, code: int, start: Callable[[], str]
):
    """The running ones leave a checkpoint and are continued; the finished are not run again."""
    waits = [tmp_path / f"{name}.waits" for name in ALL[2:4]]
    for file in waits:
        file.touch()
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r})
sys.modules["tabulate"] = None  # PyTorch imports it at exit, whereupon CPython forgets that it was interrupted
from pathlib import Path
import pytest
from tests.zoo.experiments.test_runner import FAKE, runs
from zoo.experiments import Runner
Runner(FAKE, Path({str(tmp_path)!r}), jobs=2).run(runs())
"""
    program = tmp_path / "program.py"
    program.write_text(script)
    process = subprocess.Popen([start(), str(program)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 240
    while not all((tmp_path / name / "config.yaml").exists() for name in ALL[2:4]):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == code
    assert "stopping: what runs is saved, and the same command continues\n" in said
    assert all((tmp_path / name / "checkpoints" / "last.ckpt").exists() for name in ALL[2:4])
    for file in waits:
        file.unlink()
    before = calls(tmp_path)
    assert len(before) == 4
    assert Runner(FAKE, tmp_path, jobs=1).run(runs()) == []
    assert sorted(calls(tmp_path)[4:]) == sorted(
        [f"--resume {name}" for name in ALL[2:4]] + [f"--run {name}" for name in ALL[4:]]
    )


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_anew(tmp_path: Path):
    (tmp_path / ALL[0]).mkdir()
    (tmp_path / ALL[0] / "config.yaml").write_text("half")
    assert Runner(FAKE, tmp_path).run(runs()[:1]) == []
    assert calls(tmp_path) == [f"--run {ALL[0]}"]


@pytest.mark.slow
def test_jobs_share_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    show = tmp_path / "show.py"
    show.write_text("import os, sys; sys.stdout.write(os.environ.get('CUDA_VISIBLE_DEVICES', 'none'))")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert Runner([sys.executable, str(show)], tmp_path).jobs == 2
    failures = Runner([sys.executable, str(show)], tmp_path, jobs=4).run(runs()[:4])
    assert len(failures) == 4
    assert sorted((tmp_path / f"{name}.log").read_text() for name in ALL[:4]) == ["0", "0", "1", "1"]


@pytest.mark.slow
def test_the_report(tmp_path: Path):
    Runner(FAKE, tmp_path, jobs=3).run(runs()[:-1])
    actual = results.outcomes(runs(), tmp_path)
    cells = results.cells(SWEEP, actual)
    assert [cell.median for cell in cells] == pytest.approx([2.905, 2.805, 2.6])
    assert [len(cell.values) for cell in cells] == [2, 2, 1]
    results.write(SWEEP, actual, tmp_path)
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ALL
    assert [row["status"] for row in rows] == ["complete"] * 5 + ["missing"]
    assert rows[2]["model.stack.mixer.factor"] == "2"
    assert rows[2]["val_accuracy_by_task.pairs_4"] == "0.7"
    assert (tmp_path / "sweep.png").stat().st_size > 5000


def test_controls_are_in_the_report(tmp_path: Path):
    sweep = Sweep("gated_deltanet.yaml", axes={"model.num_heads": [1]}, controls={"deep": "model.num_layers=7"})
    pair = sweep.runs()
    actual = [results.Outcome(run, {"val_loss": 1.0, "status": "complete"}) for run in pair]
    results.write(sweep, actual, tmp_path)
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["model.num_heads"], row["control"]) for row in rows] == [("1", ""), ("", "deep")]
    axes = results.figure(sweep, actual).axes[0]
    assert [line.get_label() for line in axes.get_lines()].count("deep") == 1


@pytest.mark.slow
def test_the_best_learning_rate_stands_for_a_cell(tmp_path: Path):
    sweep = Sweep("gated_deltanet.yaml", axes={"model.num_heads": [1]}, learning_rates=[0.1, 0.2])
    both = sweep.runs()
    actual = [
        results.Outcome(run, {"val_loss": loss, "status": "complete"})
        for run, loss in zip(both, (2.0, 1.0), strict=True)
    ]
    (cell,) = results.cells(sweep, actual)
    assert (cell.learning_rate, cell.values) == (0.2, [1.0])
    actual = [
        results.Outcome(run, {"val_loss": loss, "status": "complete"})
        for run, loss in zip(both, (2.0, None), strict=True)
    ]
    (cell,) = results.cells(sweep, actual)  # a diverged run is no winner
    assert (cell.learning_rate, cell.values) == (0.1, [2.0])
    (cell,) = results.cells(replace(sweep, mode="max"), actual)  # also where the highest value is best
    assert (cell.learning_rate, cell.values) == (0.1, [2.0])


def test_a_learning_rate_that_passes_the_gates_goes_before_a_better_one_that_fails():
    sweep = Sweep(
        "gated_deltanet.yaml",
        axes={"model.num_heads": [1]},
        seeds=[0, 1],
        learning_rates=[0.1, 0.2],
        metric="val_accuracy",
        mode="max",
        gates=[Gate(["val_accuracy_by_task.pairs_4"], at_least=0.95)],
    )
    numbers = {(0.1, 0): (0.9, 1.0), (0.1, 1): (0.8, 0.1), (0.2, 0): (0.6, 1.0), (0.2, 1): (0.5, 1.0)}
    actual = []
    for run in sweep.runs():
        accuracy, easy = numbers[run.learning_rate, run.seed]
        row = {"val_accuracy": accuracy, "val_accuracy_by_task": {"pairs_4": easy}, "status": "complete"}
        actual.append(results.Outcome(run, row))
    (cell,) = results.cells(sweep, actual)
    assert (cell.learning_rate, cell.values) == (0.2, [0.6, 0.5])
    assert results.failures(sweep, actual) == []


@pytest.mark.slow
def test_a_number_that_no_run_has(tmp_path: Path):
    Runner(FAKE, tmp_path).run(runs()[:1])
    sweep = Sweep("gated_deltanet.yaml", metric="val_accuracy_by_task.pairs_5")
    with pytest.raises(
        UserError, match=r"metric: .* is not in results.json; did you mean 'val_accuracy_by_task.pairs_4'"
    ):
        results.cells(sweep, results.outcomes(runs()[:1], tmp_path))


RECALLED = {"pairs_4": 1.0, "pairs_16": 0.7, "pairs_64": 0.3}


def recalled(**changes: float) -> dict[str, object]:
    return {"status": "complete", "val_accuracy": 0.5, "val_accuracy_by_task": {**RECALLED, **changes}}


@pytest.fixture
def gated(tmp_path: Path) -> tuple[Sweep, list[results.Outcome]]:
    """Two numbers of heads and a control; seed 1 of 3 heads fails at 4 pairs."""
    gates = [
        Gate(["val_accuracy_by_task.pairs_4", "val_accuracy_by_task.pairs_16"], 0.6, where={"control": "deep"}),
        Gate(["val_accuracy_by_task.pairs_4"], at_least=0.95),
    ]
    sweep = Sweep(
        "gated_deltanet.yaml",
        axes={"model.num_heads": [1, 3]},
        controls={"deep": "model.num_layers=7"},
        seeds=[0, 1],
        metric="val_accuracy",
        mode="max",
        also=["pairs_at_50", "pairs_at_90"],
        gates=gates,
    )
    rows = [recalled(), recalled(), recalled(), recalled(pairs_4=0.9), recalled(pairs_64=0.8), None]
    every = sweep.runs()
    for run, row in zip(every, rows, strict=True):
        if row is not None:
            (tmp_path / run.name).mkdir()
            write_sealed(tmp_path / run.name / "results.json", row)
    return sweep, results.outcomes(every, tmp_path)


def test_what_fails_a_gate_is_named_and_marked(gated, tmp_path: Path):
    sweep, actual = gated
    (failure,) = results.failures(sweep, actual)
    assert failure == ("3", "3, seed 1: val_accuracy_by_task.pairs_4 is 0.9, below 0.95")
    console = Console(width=200, record=True)
    console.print(results.write(sweep, actual, tmp_path))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert [line[-1] for line in lines if line and line[-1] in ("passed", "failed")] == ["passed", "failed", "passed"]
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    wrong = "val_accuracy_by_task.pairs_4 is 0.9, below 0.95"
    assert [row["gates"] for row in rows] == ["passed", "passed", "passed", wrong, "passed", ""]


def test_a_narrow_terminal_cuts_no_label(gated):
    sweep, actual = gated
    console = Console(width=80, record=True)
    console.print(results.table(sweep, actual, console.width))
    text = console.export_text()
    assert "…" not in text
    assert all(word in text for word in ("num_heads", "deep", "median", "passed", "sweep.csv"))


def test_bits_per_byte_are_shown_where_nats_per_token_cannot_be_compared():
    sweep = Sweep("gla.yaml", {"data.vocab_size": [300, 600]})
    rows = [
        {"status": "complete", "val_loss": loss, "val_bits_per_byte": bits, "tokenizer_hash": name}
        for loss, bits, name in ((3.0, 2.5, "a"), (4.0, 2.125, "b"))
    ]

    def shown(width: int) -> str:
        actual = [results.Outcome(run, row) for run, row in zip(sweep.runs(), rows, strict=True)]
        console = Console(width=width, record=True)
        console.print(results.table(sweep, actual, width))
        return " ".join(console.export_text().split())

    assert "2.125" in shown(80)
    assert "the vocabularies differ, so compare bits per byte" in shown(200)
    rows[1]["tokenizer_hash"] = "a"
    assert "bits/byte" in shown(200)
    assert "differ" not in shown(200)
    assert "bits/byte" not in shown(80)


def test_a_run_that_lacks_the_number_of_a_gate_fails_it(gated):
    sweep, actual = gated
    actual[4] = actual[4]._replace(row={"status": "complete", "val_accuracy": 0.5, "pairs_at_50": 1, "pairs_at_90": 1})
    assert ("deep", "deep, seed 0: val_accuracy_by_task.pairs_4 is missing") in results.failures(sweep, actual)


def test_further_numbers_have_columns_and_panels(gated, tmp_path: Path):
    sweep, actual = gated
    shown = results.write(sweep, actual, tmp_path)
    headers = [str(column.header) for column in shown.columns]
    assert headers.index("pairs at 90") == headers.index("pairs at 50") + 1
    at_50 = list(shown.columns[headers.index("pairs at 50")].cells)
    assert at_50 == ["32", "32", "all"]  # 16 · 4^(.2/.4)
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["pairs_at_50"]) for row in rows[:5]] == pytest.approx([32, 32, 32, 32, float("inf")])
    assert [axes.get_ylabel() for axes in results.figure(sweep, actual).axes] == [
        "validation accuracy",
        "pairs at 50",
        "pairs at 90",
    ]


@pytest.mark.slow
def test_a_cluster_runs_each_once(tmp_path: Path):
    """submitit's executor for this machine: what SLURM does with the jobs is SLURM's."""
    pytest.importorskip("submitit")
    from zoo.experiments.cluster import run_on_cluster

    (tmp_path / f"{ALL[1]}.fails").touch()
    three, runner = runs()[:3], Runner(FAKE, tmp_path)
    (failure,) = run_on_cluster(runner, three, "local", {"timeout_min": 5})
    assert failure.run == ALL[1]
    (tmp_path / f"{ALL[1]}.fails").unlink()
    assert run_on_cluster(runner, three, "local", {"timeout_min": 5}) == []
    assert sorted(calls(tmp_path)) == sorted(f"--run {ALL[i]}" for i in (0, 1, 1, 2))


@pytest.mark.slow
def test_jobs_in_the_queue_are_waited_for_and_not_submitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    submitit = pytest.importorskip("submitit")
    from zoo.experiments.cluster import run_on_cluster

    done = submitit.LocalJob.done

    def has_ended(job: Any) -> bool:
        """submitit reports every local job that it has no process object for as ended, unlike those of SLURM."""
        if job.state != "NO PROCESS AND NO RESULT":
            return done(job)
        try:
            return os.waitpid(int(job.job_id), os.WNOHANG) != (0, 0)
        except ChildProcessError:  # it was waited for
            return True

    monkeypatch.setattr(submitit.LocalJob, "done", has_ended)
    (tmp_path / f"{ALL[0]}.waits").touch()
    one, runner = runs()[:1], Runner(FAKE, tmp_path)

    def interrupt() -> None:
        while not (tmp_path / "calls.txt").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_on_cluster(runner, one, "local", {"timeout_min": 5})
    (tmp_path / f"{ALL[0]}.waits").unlink()
    assert run_on_cluster(runner, one, "local", {"timeout_min": 5}) == []
    assert calls(tmp_path) == [f"--run {ALL[0]}"]


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "options"), [("slurn", {}), ("slurm", {"gpus": 3})])
def test_an_unknown_cluster_or_option(tmp_path: Path, cluster: str, options: dict[str, int]):
    pytest.importorskip("submitit")
    from zoo.experiments.cluster import run_on_cluster

    with pytest.raises(UserError, match=f"cluster: {cluster}"):
        run_on_cluster(Runner(FAKE, tmp_path), runs()[:1], cluster, options)


def test_a_folder_of_jobs_that_is_a_link(tmp_path: Path):
    pytest.importorskip("submitit")
    from zoo.experiments.cluster import run_on_cluster

    folder, elsewhere = tmp_path / "sweep", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "jobs").symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"folder: .*jobs is a link, through which nothing is written"):
        run_on_cluster(Runner(FAKE, folder), runs()[:1], "local", {"timeout_min": 5})
    assert not list(elsewhere.iterdir())
    assert not (tmp_path / "calls.txt").exists()


@pytest.mark.parametrize("job", [5, None, ["1"], "", "../../1", "x"])
def test_damaged_records_of_jobs(tmp_path: Path, job: object):
    pytest.importorskip("submitit")
    from zoo.experiments.cluster import run_on_cluster

    write_sealed(tmp_path / "jobs.json", {ALL[0]: job})
    with pytest.raises(UserError, match=r"jobs.json is damaged \(the job of .* is .*\); delete it if no job"):
        run_on_cluster(Runner(FAKE, tmp_path), runs()[:1], "local", {"timeout_min": 5})
