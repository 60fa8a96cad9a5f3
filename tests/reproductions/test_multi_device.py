"""`reproductions/multi_device.py`: real runs in two processes, and what is made of runs that fail or go wrong."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kernels import UserError
from reproductions import multi_device as fits
from reproductions.multi_device import ScalingReport, largest_difference, multi_device
from reproductions.step_times import PARTS
from tests.commands import CLI, Command, Finished, sitting_at
from tests.forked_python import forked_python
from zoo.performance.bench_report import Report

SIZES = ("model.vocab_size=32", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=1")
TINY = ["gated_deltanet.yaml", *SIZES]
OPTIONS = ("--config", "gated_deltanet.yaml", *(f"--{key}" for key in SIZES), "--accelerator=cpu")

# In place of cli.py: leaves what a run leaves, at once. `fake.json` says of some runs how they go.
FAKE = """
import json, sys
from pathlib import Path

values = dict(a.removeprefix("--").split("=", 1) for a in sys.argv if "=" in a)
run = Path(sys.argv[sys.argv.index("--run") + 1])
does = json.loads(Path("fake.json").read_text()).get(run.name, {})
run.mkdir(parents=True)
steps, every, devices = (int(values[k]) for k in ("trainer.max_steps", "trainer.log_every_n_steps", "trainer.devices"))
with open(run / "metrics.jsonl", "w") as file:
    for step in range(every - 1, steps, every):
        seconds = 9.0 if step < 4 else 0.1 + does.get("slower", 0)
        row = {"step": step, "tokens": (step + 1) * 100.0 * devices, "peak_memory_gib": 3.0}
        row |= {"seconds_communication": 0.02} if devices > 1 else {}
        row |= {"train_loss": None if does.get("diverges") else 4 - 0.1 * step + does.get("off", 0)}
        row |= {"seconds_" + part: seconds / 5 for part in PARTS}
        file.write(json.dumps(row) + chr(10))
""".replace("PARTS", repr(PARTS))


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "bench.json").read_text())


@pytest.fixture(scope="module")
def measured(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shared_cache: Path
) -> tuple[Report, list[str]]:
    """Real runs, and their ways: one device, its reference, and these ways in two processes."""
    ways: list[str] = request.param
    if "zero2" in ways:
        pytest.importorskip("deepspeed", reason="DeepSpeed is for Linux")
    folder = tmp_path_factory.mktemp("scaling")
    with sitting_at(folder, shared_cache), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setattr("reproductions.multi_device.COMMAND", (forked_python(), str(CLI)))
        report = multi_device(
            [*TINY, "optim.warmup_steps=2"],
            ways=ways,
            batch_size=2,
            length=32,
            steps=4,
            accelerator="cpu",
            folder=str(folder / "bench"),
        )
        report.write()
    return report, ways


@pytest.mark.slow
@pytest.mark.parametrize(
    "measured",
    [["ddp", "context_parallel"], pytest.param(["ddp", "zero2", "context_parallel"], marks=pytest.mark.nightly)],
    indirect=True,
    ids=" ".join,
)
def test_two_processes_are_measured_and_train_as_one(measured: tuple[Report, list[str]]):
    report, ways = measured
    actual = record(report.folder)
    assert not report.failed
    assert [(row["way"], row["devices"]) for row in actual["rows"]] == [("one device", 1), *((way, 2) for way in ways)]
    base, *others = actual["rows"]
    for row in actual["rows"]:
        assert "note" not in row
        tokens = 2 * 32 * (2 if row["way"] in ("ddp", "zero2") else 1)
        assert row["tokens_per_second"] == pytest.approx(tokens / row["step_ms"] * 1e3)
        assert row["efficiency"] == pytest.approx(row["tokens_per_second"] / row["devices"] / base["tokens_per_second"])
        assert list(row["parts_ms"]) == list(PARTS)
        assert all(milliseconds >= 0 for milliseconds in row["parts_ms"].values())
        assert row["peak_gib"] is None  # of the host, and not of a device
        assert len(row["losses"]) == 8
        assert row["command"].startswith("python cli.py fit --config gated_deltanet.yaml")
    assert base["efficiency"] == 1
    assert base["loss_difference"] is None
    for row in others:
        assert row["gate"]["passed"]
        assert 0 <= row["loss_difference"] <= 1e-4
        assert f"--config train/{row['way']}.yaml" in row["command"]
    (reference,) = actual["references"]
    assert "--trainer.accumulate_grad_batches=2" in reference["command"]
    assert reference["losses"] == pytest.approx(others[0]["losses"], rel=1e-4)
    assert reference["losses"] != pytest.approx(base["losses"], rel=1e-3)  # which are of other samples
    assert not list(report.folder.rglob("*.ckpt"))
    assert (report.folder / "bench.png").stat().st_size > 5000


@pytest.fixture
def command(desk: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """The program, as its last lines run it."""

    def run(*arguments: str, **_: Any) -> Finished:
        said = ""
        try:
            code = fits.main([*arguments])
        except UserError as error:
            code, said = 2, f"error: {error.on_command_line}\n"
        out, err = capsys.readouterr()
        return Finished(code, out, err + said)

    return run


@pytest.fixture
def fake(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The desk, with a command line that only pretends to train."""
    (desk / "fake.py").write_text(FAKE)
    (desk / "fake.json").write_text("{}")
    monkeypatch.setattr(fits, "COMMAND", (sys.executable, str(desk / "fake.py")))
    return desk


def goes(desk: Path, **how: dict[str, Any]) -> None:
    """Say how some runs go; `ddp_2` is `ddp-2`."""
    names = {name: "-".join(name.rsplit("_", 1)) for name in how}
    (desk / "fake.json").write_text(json.dumps({names[name]: does for name, does in how.items()}))


@pytest.mark.slow
def test_speed_is_of_the_steps_after_the_first(fake: Path, command: Command):
    goes(fake, ddp_2={"slower": 0.1})
    done = command(*OPTIONS, "--ways=[ddp]", "--devices=[4,2]", "--steps=20").ok()
    actual = record(fake / "runs/multi-device")
    speeds = [(row["devices"], row["tokens_per_second"], row["efficiency"]) for row in actual["rows"]]
    assert speeds == [
        (1, pytest.approx(1000), pytest.approx(1)),
        (2, pytest.approx(1000), pytest.approx(0.5)),
        (4, pytest.approx(4000), pytest.approx(1)),
    ]
    batches = [row["command"].partition("--data.batch_size=")[2].split()[0] for row in actual["rows"]]
    assert batches == ["8", "16", "32"]  # the config has 8
    assert [row["devices"] for row in actual["references"]] == [2, 4]
    assert len(ScalingReport(fake, actual, actual["rows"]).picture().axes[0].lines) == 2
    assert [row["communication_ms"] for row in actual["rows"]] == [None, pytest.approx(20), pytest.approx(20)]
    assert "waits" in done.out
    assert "GiB" not in done.out
    command(*OPTIONS, "--ways=[ddp]", "--devices=[2]", "--curves=false").ok()
    actual = record(fake / "runs/multi-device")
    assert actual["references"] == []
    assert actual["rows"][1]["loss_difference"] is None
    assert not (fake / "runs/multi-device/fits/ddp-4").exists()


@pytest.mark.slow
def test_other_losses_are_wrong(fake: Path, command: Command):
    goes(fake, ddp_2={"off": 1e-3}, context_parallel_2={"diverges": True})
    options = (*OPTIONS, "--ways=[ddp,context_parallel]", "--devices=[2]")
    done = command(*options)
    assert done.code == 1
    assert done.out.count("WRONG") == 2
    _, ddp, shared = record(fake / "runs/multi-device")["rows"]
    assert not ddp["gate"]["passed"]
    assert ddp["note"] == "loss is off by 5.9e-04, allowed 1e-04"
    assert shared["loss_difference"] is None
    assert shared["losses"][0] is None
    goes(fake, ddp_2={"off": 1e-3})
    assert command(*options, "--precision=bf16-mixed").code == 0


@pytest.mark.slow
def test_a_folder_of_somebody_else_is_left_alone(fake: Path, command: Command):
    (fake / "mine/fits").mkdir(parents=True)
    done = command(*OPTIONS, "--ways=[ddp]", "--folder=mine").refused()
    assert "folder: mine/fits exists and does not belong to a benchmark" in done.err


@pytest.mark.slow
def test_only_runs_of_a_benchmark_are_removed(fake: Path, command: Command):
    (fake / "mine/fits/notes").mkdir(parents=True)
    (fake / "mine/bench.json").write_text('{"kind": "scaling", "device": "cpu", "rows": []}')
    done = command(*OPTIONS, "--ways=[ddp]", "--folder=mine").refused()
    assert "folder: mine/fits/notes is not a run of a benchmark" in done.err
    assert (fake / "mine/fits/notes").is_dir()


def test_curves_differ_by_their_worst_step():
    assert largest_difference([1.0, 2.2, 3.0], [1.0, 2.0, 3.3]) == pytest.approx(0.1)
    assert largest_difference([], []) == float("inf")
    assert largest_difference([1.0], [1.0, 2.0]) == float("inf")
