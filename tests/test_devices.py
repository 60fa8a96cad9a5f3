"""Whole runs on GPUs, as processes of their own: what the kernels' own tests cannot see."""

import json
import statistics
from pathlib import Path

import pytest

from zoo.train.metrics_file import read_metrics

from .commands import sitting_at, start

pytest_plugins = "tests.desk"
pytestmark = [pytest.mark.gpu, pytest.mark.slow]

ACCELERATOR = "gpu"
CAPTURED, EAGER = ("--config", "train/cuda_graph.yaml"), ("--cuda_graph=false",)
SHORT = """
model: {hidden_size: 128, num_heads: 2, num_layers: 3}
data: {sequence_length: 256, batch_size: 4}
trainer: {max_steps: 8, limit_val_batches: 2, val_check_interval: 8, log_every_n_steps: 1}
optim: {schedule: constant, warmup_steps: 2}
samples: {prompts: []}
"""


def fit(folder: Path, cache: Path, name: str, *arguments: str, **environment: str) -> list[float]:
    """Train `runs/name` in `folder`; the loss of each step that was logged."""
    with sitting_at(folder, cache):
        (folder / "short.yaml").write_text(SHORT)
    process = start(folder, cache, "fit", *arguments, ZOO_RUN="", **environment)
    said = "".join(process.communicate(timeout=570))
    assert process.returncode == 0, said[-3000:]
    assert "runs eagerly" not in said or not {*CAPTURED} < {*arguments}  # what a captured run says that is not captured
    return [row["train_loss"] for row in read_metrics(folder / "runs" / name / "metrics.jsonl") if "train_loss" in row]


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
    """Compiled blocks, the profiler, norms of states, times of the parts of a step; none changes the losses."""
    plain = fit(tmp_path, shared_cache, "plain", *short("plain"))
    overlays = ("--config", "train/compile.yaml", "--config", "train/profile.yaml")
    options = ("--state_norms.every_n_validations=1",)
    surrounded = fit(tmp_path, shared_cache, "all", *short("all", *overlays, *options))
    assert surrounded == pytest.approx(plain, rel=2e-2)
    run = tmp_path / "runs" / "all"
    assert (run / "fit-profile.txt").is_file()
    actual = {name for row in read_metrics(run / "metrics.jsonl") for name in row}
    parts = {f"seconds_{part}" for part in ("data", "forward", "backward", "optimizer", "other")}
    assert parts | {"peak_memory_gib", "tokens_per_second", "gradient_norm"} <= actual


def test_captured_steps_are_the_eager_ones(tmp_path: Path, shared_cache: Path) -> None:
    eager = fit(tmp_path, shared_cache, "eager", *short("eager", *EAGER))
    assert fit(tmp_path, shared_cache, "captured", *short("captured", *CAPTURED)) == eager


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> list[float]:
    """The losses of one GPU in fp32."""
    return fit(tmp_path_factory.mktemp("alone"), shared_cache, "one", *short("one", "--trainer.precision=32-true"))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("way", ["ddp", "zero1", "zero2", "zero3", "fsdp", "context_parallel"])
def test_two_gpus_train_as_one(way: str, alone: list[float], tmp_path: Path, shared_cache: Path) -> None:
    overlay = ("--config", f"train/{way}.yaml", "--trainer.precision=32-true")
    losses = fit(tmp_path, shared_cache, way, *short(way, *overlay, devices=2))
    assert losses == pytest.approx(alone, rel=1e-3)
    assert json.loads((tmp_path / "runs" / way / "results.json").read_text())["devices"] == 2


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    ("way", "more"),
    [("ddp", ()), ("context_parallel", ()), ("context_parallel", ("--activation_checkpointing=1",))],
)
@pytest.mark.parametrize("batches", [1, 2])
def test_two_gpus_in_captured_steps(
    batches: int, way: str, more: tuple[str, ...], tmp_path: Path, shared_cache: Path
) -> None:
    options = ("--config", f"train/{way}.yaml", f"--trainer.accumulate_grad_batches={batches}", *more)
    eager = fit(tmp_path, shared_cache, "eager", *short("eager", *options, *EAGER, devices=2))
    assert fit(tmp_path, shared_cache, "captured", *short("captured", *options, *CAPTURED, devices=2)) == eager
