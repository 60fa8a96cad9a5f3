"""Whole runs on GPUs, as processes of their own: what the kernels' own tests cannot see."""

import json
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from zoo.train.metrics_file import read_metrics

from .commands import sitting_at, start

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ACCELERATOR = "gpu"
DDP = ("--trainer.strategy=ddp",)
CAPTURED, EAGER = ("--config", "train/cuda_graph.yaml"), ("--cuda_graph=false",)
SHORT = """
model: {hidden_size: 128, num_heads: 2, num_layers: 3}
data: {sequence_length: 256, batch_size: 4}
trainer: {max_steps: 8, limit_val_batches: 2, val_check_interval: 8, log_every_n_steps: 1}
optim: {schedule: constant, warmup_steps: 2}
samples: {prompts: []}
"""


def started(folder: Path, cache: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `fit` in `folder`."""
    with sitting_at(folder, cache):
        (folder / "short.yaml").write_text(SHORT)
    return start(folder, cache, "fit", *arguments, ZOO_RUN="", **environment)


def losses_of(process: subprocess.Popen[str], run: Path, captured: bool = False) -> list[float]:
    """The loss of each step that a run logged, when it has ended."""
    said = "".join(process.communicate(timeout=570))
    assert process.returncode == 0, said[-3000:]
    assert "runs eagerly" not in said or not captured  # what a captured run says that is not captured
    return [row["train_loss"] for row in read_metrics(run / "metrics.jsonl") if "train_loss" in row]


def fit(folder: Path, cache: Path, name: str, *arguments: str, **environment: str) -> list[float]:
    """Train `runs/name` in `folder`; the loss of each step that was logged."""
    process = started(folder, cache, *arguments, **environment)
    return losses_of(process, folder / "runs" / name, {*CAPTURED} < {*arguments})


def short(name: str, *more: str, devices: int = 1) -> tuple[str, ...]:
    """The arguments of a run of eight steps of an H2 stack."""
    where = (f"--trainer.accelerator={ACCELERATOR}", f"--trainer.devices={devices}")
    return ("--config", "gdn_h2.yaml", "--config", "short.yaml", *more, *where, "--run", name)


@pytest.mark.parametrize("config", ["gdn_h2.yaml", "gla.yaml"])
def test_a_thousand_steps_follow_the_torch_backend(config: str, tmp_path: Path, shared_cache: Path) -> None:
    last = {}
    for backend in ("auto", "torch"):
        run = ("--config", config, f"--trainer.accelerator={ACCELERATOR}", "--trainer.devices=1", "--run", backend)
        steps = ("--trainer.max_steps=1000", "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=1000")
        losses = fit(tmp_path, shared_cache, backend, *run, *steps, ZOO_BACKEND=backend)
        assert len(losses) == 1000
        last[backend] = statistics.mean(losses[-100:])
    assert last["auto"] == pytest.approx(last["torch"], rel=1e-2), last
    assert last["auto"] < 4.5  # it has learnt something


def test_a_continued_run_is_the_whole_run(tmp_path: Path, shared_cache: Path) -> None:
    whole = fit(tmp_path, shared_cache, "whole", *short("whole"))
    first = fit(tmp_path, shared_cache, "parts", *short("parts", "--trainer.max_steps=5"))
    both = fit(tmp_path, shared_cache, "parts", "--resume", "runs/parts", "--trainer.max_steps=8")
    assert len(first) == 5
    assert both == whole
    assert len(set(whole)) == 8


def test_all_that_surrounds_a_step(tmp_path: Path, shared_cache: Path) -> None:
    """Compiled blocks, the profiler; neither changes the losses."""
    plain = fit(tmp_path, shared_cache, "plain", *short("plain"))
    overlays = ("--config", "train/compile.yaml", "--config", "train/profile.yaml")
    surrounded = fit(tmp_path, shared_cache, "all", *short("all", *overlays))
    assert surrounded == pytest.approx(plain, rel=2e-2)
    run = tmp_path / "runs" / "all"
    assert (run / "fit-profile.txt").is_file()
    actual = {name for row in read_metrics(run / "metrics.jsonl") for name in row}
    assert {"peak_memory_gib", "tokens_per_second", "gradient_norm"} <= actual


def test_captured_steps_are_the_eager_ones(tmp_path: Path, shared_cache: Path) -> None:
    eager = fit(tmp_path, shared_cache, "eager", *short("eager", *EAGER))
    assert fit(tmp_path, shared_cache, "captured", *short("captured", *CAPTURED)) == eager


WAYS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "context_parallel")


class Runs(NamedTuple):
    """Runs that were started together, as most of their time is that of starting, by name."""

    folder: Path
    processes: dict[str, subprocess.Popen[str]]

    def losses(self, name: str) -> list[float]:
        return losses_of(self.processes[name], self.folder / "runs" / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[Runs]:
    """One GPU, and two in each way, in fp32."""
    folder, processes = tmp_path_factory.mktemp("ways"), {}
    for name in ("one", *WAYS):
        overlay = () if name == "one" else ("--config", f"train/{name}.yaml")
        devices = 1 if name == "one" else 2
        arguments = short(name, *overlay, "--trainer.precision=32-true", devices=devices)
        processes[name] = started(folder, shared_cache, *arguments)
    yield Runs(folder, processes)
    for process in processes.values():
        process.kill()


@pytest.fixture(scope="module")
def alone(runs: Runs) -> list[float]:
    """The losses of one GPU."""
    return runs.losses("one")


@pytest.mark.multi_gpu
@pytest.mark.xdist_group("ways")  # they share the runs
@pytest.mark.parametrize("way", WAYS)
def test_two_gpus_train_as_one(way: str, alone: list[float], runs: Runs) -> None:
    assert runs.losses(way) == pytest.approx(alone, rel=1e-3)
    assert json.loads((runs.folder / "runs" / way / "results.json").read_text())["devices"] == 2


@pytest.mark.multi_gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_two_gpus_have_the_bits_of_one(precision: str, tmp_path: Path, shared_cache: Path) -> None:
    """In deterministic mode, with rows on each GPU and with parts of each row."""
    parts = ("--deterministic_kernels=true", "--rows_per_device=2", "--sequence_parts=2", *EAGER)
    runs, processes = {"one": (), "ddp": DDP, "context_parallel": (*DDP, "--context_parallel=2")}, {}
    for name, way in runs.items():
        arguments = short(name, *parts, *way, f"--trainer.precision={precision}", devices=2 if way else 1)
        processes[name] = started(tmp_path, shared_cache, *arguments)
    for name, process in processes.items():
        losses_of(process, tmp_path / "runs" / name)
    rows = {name: read_metrics(tmp_path / "runs" / name / "metrics.jsonl") for name in runs}
    for key in ("train_loss", "gradient_norm"):
        values = {name: [row[key] for row in rows[name] if key in row] for name in runs}
        assert len(set(values["one"])) == 8
        assert values["ddp"] == values["one"], key
        assert values["context_parallel"] == values["one"], key


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("way", "more", "batches"),
    [
        ("ddp", (), 2),  # on H200s, two of five pairs were bitwise equal; the cause of the others is not known
        ("context_parallel", (), 1),
        ("context_parallel", ("--activation_checkpointing=1",), 2),
    ],
)
def test_two_gpus_in_captured_steps(
    way: str, more: tuple[str, ...], batches: int, tmp_path: Path, shared_cache: Path
) -> None:
    options = ("--config", f"train/{way}.yaml", f"--trainer.accumulate_grad_batches={batches}", *more)
    processes = {
        name: started(tmp_path, shared_cache, *short(name, *options, *steps, devices=2))
        for name, steps in (("eager", EAGER), ("captured", CAPTURED))
    }
    losses = {name: losses_of(each, tmp_path / "runs" / name, name == "captured") for name, each in processes.items()}
    assert losses["captured"] == losses["eager"]
