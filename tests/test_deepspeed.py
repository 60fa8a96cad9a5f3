"""ZeRO in two processes on a CPU: the run is that of one process, survives a killed process, and can be taken apart."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cli
import zoo
from kernels import UserError
from zoo.checkpoints.format import read_checkpoint, read_weights
from zoo.checkpoints.zero_shards import divided_alike
from zoo.train.metrics_file import read_metrics

from .commands import FIT, sitting_at, start

pytest.importorskip("deepspeed", reason="DeepSpeed is for Linux")
pytestmark = pytest.mark.slow

STEPS, EVERY, KILLED_AT = 6, 2, 5
SETTING = f"""
model: {{intermediate_size: 32}}
data: {{vocab_size: 300, sequence_length: 16, batch_size: 2}}
trainer: {{max_steps: {STEPS}, val_check_interval: {STEPS}}}
checkpoints: {{every_n_steps: {EVERY}, keep_every_n_steps: 4}}
optim: {{warmup_steps: 2, learning_rate: 1.0e-2, gradient_clip: 0.5}}
samples: {{prompts: []}}
"""
RUN = (*FIT, "--config", "setting.yaml", "--config", "watching.yaml")
# Writes down what each process sees and how often ZeRO 3 gathers parameters, and may spoil the loss of one of them, or
# kill it in the middle of a step.
WATCHER = """
import json, os, signal
from pathlib import Path
import lightning as L
import torch
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator

fetch, fetched = Coordinator.fetch_sub_module, []

def noted(self, module, **how):
    fetched.append(type(module).__name__)
    return fetch(self, module, **how)

Coordinator.fetch_sub_module = noted

class Watch(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.tokens = batch.tokens.tolist()

    def on_before_backward(self, trainer, module, loss):
        self.loss = loss.item()
        here = [trainer.global_step, trainer.global_rank]
        if here == json.loads(os.environ.get("SPOIL", "null")):
            loss.data.fill_(float("nan"))
        if here == json.loads(os.environ.get("KILL", "null")):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        row = {"step": trainer.fit_loop.total_batch_idx + 1, "loss": self.loss, "tokens": self.tokens}
        row["dtypes"] = sorted({str(p.dtype) for p in module.parameters()})
        engine = getattr(trainer.strategy, "deepspeed_engine", None)
        row["whole"] = len(getattr(getattr(engine, "optimizer", None), "persistent_parameters", ()))
        row["fetched"] = fetched.copy()
        fetched.clear()
        with open(Path(trainer.default_root_dir) / f"seen-{trainer.global_rank}.jsonl", "a") as file:
            file.write(json.dumps(row) + chr(10))
"""


def zero(stage: int) -> tuple[str, ...]:
    return ("--config", f"train/zero{stage}.yaml", "--config", "train/cpu_deepspeed.yaml")


def seen(run: Path, rank: int) -> dict[int, dict[str, Any]]:
    """Number of a batch → what a process saw of it, as it was last written."""
    rows = [json.loads(line) for line in (run / f"seen-{rank}.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


def losses(run: Path, ranks: int = 2) -> dict[int, list[float]]:
    """Number of a batch → the loss of each process."""
    rows = [seen(run, rank) for rank in range(ranks)]
    return {step: [row[step]["loss"] for row in rows] for step in rows[0]}


def results(run: Path) -> dict[str, Any]:
    return json.loads((run / "results.json").read_text())


def together(folder: Path, cache: Path, *commands: tuple[tuple[str, ...], dict[str, str]]) -> Iterator[tuple[int, str]]:
    """Run commands at the same time; yields exit code and output of each."""
    one_thread = {"OMP_NUM_THREADS": "1", "ZOO_RUN": ""}  # another order of a sum is another sum
    processes: list[subprocess.Popen[str]] = [
        start(folder, cache, *arguments, **one_thread, **environment) for arguments, environment in commands
    ]
    for process in processes:
        out, err = process.communicate(timeout=240)
        yield process.returncode, out + err


def to_be_killed(stage: int) -> tuple[tuple[str, ...], dict[str, str]]:
    return (*RUN, *zero(stage), "--run", f"{stage}-killed"), {"KILL": f"[{KILLED_AT}, 1]"}


def continue_killed(folder: Path, cache: Path, stage: int, code: int, said: str) -> None:
    """Check that a run of `to_be_killed` ended with an error, and continue it."""
    assert code != 0, said
    assert max(losses(folder / "runs" / f"{stage}-killed")) == KILLED_AT
    ((code, said),) = together(folder, cache, (("fit", "--resume", f"{stage}-killed"), {}))
    assert code == 0, said


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Path:
    """Runs: `one` in this process; in two processes `2`, `3`, and `3-killed`, of whose processes one was killed before
    it was continued. `2-alone` is in the middle of `2`."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "zero_watcher.py").write_text(WATCHER)
    (folder / "setting.yaml").write_text(SETTING)
    (folder / "watching.yaml").write_text("trainer: {callbacks: {class_path: zero_watcher.Watch}}\n")
    with sitting_at(folder, shared_cache):
        assert cli.run([*RUN, "--run", "one"]) == 0
    whole = [((*RUN, *zero(stage), "--run", str(stage)), {}) for stage in (2, 3)]
    *fine, killed = together(folder, shared_cache, *whole, to_be_killed(3))
    assert [code for code, _ in fine] == [0, 0], fine
    (folder / "said-3.txt").write_text(fine[1][1])
    continue_killed(folder, shared_cache, 3, *killed)
    alone = folder / "runs" / "2-alone"
    shutil.copytree(folder / "runs" / "2", alone, ignore=shutil.ignore_patterns("seen-*"))
    shutil.copy(alone / "checkpoints" / "step-00000004.ckpt", alone / "checkpoints" / "last.ckpt")
    return folder


GRADIENTS = """
from pathlib import Path
import lightning as L
import torch
from deepspeed.utils import safe_get_full_grad

class Gradients(L.Callback):
    def on_after_backward(self, trainer, module):
        if (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            gradients = {name: safe_get_full_grad(parameter).clone() for name, parameter in module.named_parameters()}
            name = f"gradients-{trainer.global_step}-{trainer.global_rank}.pt"
            torch.save(gradients, Path(trainer.default_root_dir) / name)
"""


def test_zero_2_accumulates_and_clips_as_ddp_does(desk: Path, shared_cache: Path) -> None:
    """In gradients and weights; DeepSpeed's issue 7718 reports other gradients."""
    (desk / "gradients.py").write_text(GRADIENTS)
    (desk / "gradients.yaml").write_text("trainer: {callbacks: {class_path: gradients.Gradients}}\n")
    options = ("--config", "gradients.yaml", "--trainer.accumulate_grad_batches=3", "--trainer.max_steps=4")
    ways = {"ddp": ("--trainer.devices=2", "--trainer.strategy=ddp"), "zero-2": zero(2)}
    base = (*FIT, "--config", "setting.yaml")
    commands = [((*base, *way, *options, "--run", f"accumulated-{name}"), {}) for name, way in ways.items()]
    for code, said in together(desk, shared_cache, *commands):
        assert code == 0, said
    ddp, zero_2 = (desk / "runs" / f"accumulated-{name}" for name in ways)
    for step in range(4):
        expected, gradients = (torch.load(run / f"gradients-{step}-1.pt") for run in (ddp, zero_2))
        assert nn.utils.get_total_norm(expected.values()) > 0.5  # so it is clipped
        torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    weights, others = (zoo.load(run).state_dict() for run in (zero_2, ddp))
    torch.testing.assert_close(weights, others, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def more(desk: Path, shared_cache: Path) -> Path:
    """Like `desk`, with `bf16-one`, and in two processes `bf16` and `2-killed`."""
    bf16 = ("--trainer.precision=bf16-mixed", "--trainer.max_steps=4", "--trainer.accumulate_grad_batches=2")
    with sitting_at(desk, shared_cache):
        assert cli.run([*RUN, "--run", "bf16-one", *bf16]) == 0
    spoiled = ((*RUN, *zero(3), "--run", "bf16", *bf16), {"SPOIL": "[3, 1]"})
    (code, said), killed = together(desk, shared_cache, spoiled, to_be_killed(2))
    assert code == 0, said
    continue_killed(desk, shared_cache, 2, *killed)
    return desk


@pytest.mark.parametrize(
    ("run", "tolerance"), [("2", 1e-5), ("3", 1e-5), pytest.param("bf16", 2e-3, marks=pytest.mark.nightly)]
)
def test_two_processes_train_as_one(run: str, tolerance: float, desk: Path, request: pytest.FixtureRequest):
    if run == "bf16":
        request.getfixturevalue("more")
    alone = desk / "runs" / ("bf16-one" if run == "bf16" else "one")
    one, two = losses(alone, ranks=1), losses(desk / "runs" / run)
    assert list(two) == list(one)
    assert [sum(pair) / 2 for pair in two.values()] == pytest.approx([loss for (loss,) in one.values()], abs=tolerance)
    assert len({loss for (loss,) in one.values()}) == len(one) >= STEPS
    norms, expected = (
        [row["gradient_norm"] for row in read_metrics(path / "metrics.jsonl") if "gradient_norm" in row]
        for path in (desk / "runs" / run, alone)
    )
    assert len(norms) == len(expected) >= 4
    assert norms[:3] == pytest.approx(expected[:3], rel=10 * tolerance)  # the fourth is spoiled in bf16
    actual = results(desk / "runs" / run)
    assert (actual["devices"], actual["status"], actual["tokens_seen"]) == (2, "complete", len(one) * 2 * 16)
    assert actual["parameters"] == results(alone)["parameters"]


def test_the_size_at_the_start_is_of_whole_parameters(desk: Path):
    said = (desk / "said-3.txt").read_text()
    rows = [
        [cell.strip(" │") for cell in line.split("│")] for line in said.splitlines() if "×" in line or "whole" in line
    ]
    counts = {row[2]: int(row[3].replace(",", "")) for row in rows}
    assert counts.pop("whole model") == results(desk / "runs" / "one")["parameters"]
    assert len(counts) == 3
    assert all(counts.values())


def test_a_block_is_gathered_at_once(desk: Path):
    """Not layer by layer, nor its small parameters by themselves after each step: that would take the host too long."""
    for row in list(seen(desk / "runs" / "3", 0).values())[1:]:
        assert (
            {"Block", "Embedding"}
            <= set(row["fetched"])
            <= {*("Block", "Embedding", "RMSNorm", "Linear", "LanguageModel", "Pretraining")}
        )
        assert row["fetched"].count("Linear") <= 2  # the head
        assert row["whole"] == 0


@pytest.mark.nightly
def test_parameters_stay_in_fp32(more: Path):
    """Those of the gates, too: bf16 is where autocast has it, as in one process."""
    for row in seen(more / "runs" / "bf16", 0).values():
        assert row["dtypes"] == ["torch.float32"]
    assert losses(more / "runs" / "bf16")[1] != losses(more / "runs" / "3")[1]
    weights = zoo.load(more / "runs" / "bf16").state_dict()
    gates = [tensor for name, tensor in weights.items() if name.endswith(("A_log", "dt_bias"))]
    assert gates
    assert all((gate.bfloat16().float() != gate).any() for gate in gates)


@pytest.mark.nightly
def test_a_step_that_one_process_spoils_is_taken_by_none(more: Path):
    rows = read_metrics(more / "runs" / "bf16" / "metrics.jsonl")
    assert [row["skipped_steps"] for row in rows if "skipped_steps" in row] == [0, 0, 0, 1]
    assert all(row["gradient_norm"] > 0 for row in rows[:3])
    for tensor in zoo.load(more / "runs" / "bf16").state_dict().values():
        assert tensor.isfinite().all()


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_a_killed_run_continues_bitwise(stage: int, desk: Path, request: pytest.FixtureRequest):
    """One process was killed in the middle of a step; the other one could not go on."""
    if stage == 2:
        request.getfixturevalue("more")
    killed, whole = desk / "runs" / f"{stage}-killed", desk / "runs" / str(stage)
    lines = (killed / "seen-0.jsonl").read_text().splitlines()
    last = KILLED_AT // EVERY * EVERY
    assert [json.loads(line)["step"] for line in lines] == [*range(1, KILLED_AT + 1), *range(last + 1, STEPS + 1)]
    assert losses(killed) == losses(whole)
    assert results(killed)["val_loss"] == results(whole)["val_loss"]
    files = [read_checkpoint(file) for file in (killed / "checkpoints").glob("*.ckpt")]
    assert {path.name for path in (killed / "checkpoints").glob("shards-*")} == {f["shards"]["folder"] for f in files}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_divided_checkpoint_is_one_model(stage: int, desk: Path, shared_cache: Path, capsys: Any):
    """`zoo.load`, `validate` in one process, `generate` and `export` see the weights that the two processes had."""
    run = desk / "runs" / str(stage)
    one = zoo.load(desk / "runs" / "one").state_dict()
    for name, tensor in zoo.load(run).state_dict().items():
        torch.testing.assert_close(tensor, one[name], atol=2e-3, rtol=0)
    with sitting_at(desk, shared_cache):
        alone = ("--trainer.devices=1", "--trainer.strategy=auto")
        same = f"--trainer.limit_val_batches={results(run)['val_batches']}"
        assert cli.run(["validate", "--checkpoint", str(run), *alone, same]) == 0
        assert f"{results(run)['val_loss']:.3f}" in capsys.readouterr().out
        cli.run(["generate", "--checkpoint", str(run), "--prompt=def", "--max_new_tokens=3", "--seed=0"])
        text = capsys.readouterr().out
        assert text.startswith("def")
        assert cli.run(["export", "--checkpoint", str(run), f"--output=exported-{stage}"]) == 0
        capsys.readouterr()
        cli.run(["generate", f"--checkpoint=exported-{stage}", "--prompt=def", "--max_new_tokens=3", "--seed=0"])
        assert capsys.readouterr().out == text
    exported, weights = zoo.load(desk / f"exported-{stage}").state_dict(), zoo.load(run).state_dict()
    assert exported.keys() == weights.keys() == one.keys()
    assert [name for name in weights if not torch.equal(weights[name], exported[name])] == []
    assert sorted(path.name for path in (desk / f"exported-{stage}").iterdir()) == [
        "config.yaml",
        "hashes.json",
        "model.safetensors",
        "tokenizer.json",
    ]


@pytest.mark.parametrize("damage", ["missing folder", "missing file", "truncated"])
def test_damaged_shards_are_told_in_one_sentence(damage: str, desk: Path, tmp_path: Path):
    shutil.copytree(desk / "runs" / "3" / "checkpoints", tmp_path / "checkpoints")
    shards = tmp_path / "checkpoints" / read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["shards"]["folder"]
    part = next(shards.glob("*_rank_1_*optim*"))
    if damage == "missing folder":
        shutil.rmtree(shards)
    elif damage == "missing file":
        part.unlink()
    else:
        os.truncate(part, 1000)
    message = "is missing" if "missing" in damage else "is damaged"
    with pytest.raises(UserError, match=message):
        zoo.load(tmp_path)
    with pytest.raises(UserError, match=message):
        read_weights(tmp_path)


def test_another_number_of_processes(desk: Path, shared_cache: Path):
    """Stages 1 and 2 are divided anew, and go on as the two processes would: no sample is lost or repeated."""
    resume = ("fit", "--resume", "2-alone", "--trainer.devices=1", "--trainer.strategy.init_args.stage=1")
    ((code, said),) = together(desk, shared_cache, (resume, {}))
    assert code == 0, said
    alone, one = (losses(desk / "runs" / name, ranks=1) for name in ("2-alone", "one"))
    assert [alone[step] for step in (5, 6)] == [pytest.approx(one[step], abs=1e-5) for step in (5, 6)]
    halves = [seen(desk / "runs" / "2", rank) for rank in (0, 1)]
    samples = [halves[0][step]["tokens"] + halves[1][step]["tokens"] for step in range(1, 5)]
    samples += [row["tokens"] for row in seen(desk / "runs" / "2-alone", 0).values()]
    assert samples == [row["tokens"] for row in seen(desk / "runs" / "one", 0).values()]
    assert len({str(sequence) for step in samples for sequence in step}) == STEPS * 2


@pytest.mark.parametrize(
    ("run", "stage", "processes", "said"),
    [
        ("2", 2, 2, None),
        ("2", 2, 4, None),
        ("2", 1, 2, None),
        ("3", 3, 2, None),
        ("3", 3, 4, "cannot be continued by ZeRO 3 with 4"),
        ("3", 2, 2, "cannot be continued by ZeRO 2 with 2"),
        ("2", 3, 2, "cannot be continued by ZeRO 3 with 2"),
        ("one", 2, 2, "was not saved by ZeRO"),
    ],
)
def test_what_can_be_continued(run: str, stage: int, processes: int, said: str | None, desk: Path):
    path = desk / "runs" / run / "checkpoints" / "last.ckpt"
    if said is None:
        assert divided_alike(path, read_checkpoint(path), stage, processes) == ((stage, processes) == (int(run), 2))
    else:
        with pytest.raises(UserError, match=said):
            divided_alike(path, read_checkpoint(path), stage, processes)


def test_other_strategies_refuse_a_divided_checkpoint(desk: Path, shared_cache: Path):
    with sitting_at(desk, shared_cache), pytest.raises(UserError, match="was saved by ZeRO"):
        cli.run(["fit", "--resume", "2", "--trainer.max_steps=8", "--trainer.devices=1", "--trainer.strategy=auto"])
