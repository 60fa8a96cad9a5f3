"""The settings of a ZeRO strategy, and one step of it in a single process."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from kernels import UserError
from tests.forked_python import forked_python
from tests.zoo.tiny import ResumableLoader, pretraining, trainer, validation_loader

pytest.importorskip("deepspeed", reason="DeepSpeed is for Linux")

from zoo.train.zero import Zero, ZeroPrecision


def test_sections_are_laid_over_ours():
    config = Zero(stage=3, config={"zero_optimization": {"overlap_comm": False}, "aio": {"queue_depth": 4}}).config
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["overlap_comm"] is False
    assert config["aio"] == {"queue_depth": 4}


def test_offload():
    zero = Zero(stage=3, offload_optimizer="cpu", offload_parameters="nvme", nvme_path="/fast").config
    assert zero["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert zero["zero_optimization"]["offload_param"]["nvme_path"] == "/fast"
    assert not zero["zero_force_ds_cpu_optimizer"]  # the optimiser is the one of `optim`


def test_contradictions():
    with pytest.raises(UserError, match="only stage 3 offloads to nvme"):
        Zero(stage=1, offload_optimizer="nvme")


def test_precisions():
    for precision in ("bf16-true", "16-mixed", "16-true"):
        with pytest.raises(UserError, match=f"not {precision}"):
            ZeroPrecision(precision, "cpu")
    with ZeroPrecision("bf16-mixed", "cpu").forward_context():
        assert torch.is_autocast_enabled("cpu")
    with ZeroPrecision("32-true", "cpu").forward_context():
        assert not torch.is_autocast_enabled("cpu")
    batch = torch.zeros(2, 3)
    assert ZeroPrecision("bf16-mixed", "cpu").convert_input(batch) is batch


def test_a_shard_that_cannot_be_written_stops_no_process(tmp_path):
    from zoo.train.zero_engine import Writer

    writer = Writer(None)
    writer.failures = []
    writer.save({}, str(tmp_path / "missing" / "shard.pt"))
    writer.save({"weight": torch.ones(2)}, str(tmp_path / "shard.pt"))
    assert [type(failure) for failure in writer.failures] == [FileNotFoundError]
    assert torch.equal(writer.load(str(tmp_path / "shard.pt"))["weight"], torch.ones(2))


def train(folder: Path, **options: object) -> None:
    """Two steps of SGD on two batches each, whose gradients are clipped to a fraction of their norm."""
    module = pretraining(optimizer=torch.optim.SGD, learning_rate=1.0, warmup_steps=0, gradient_clip=0.1)
    run = trainer(folder, max_steps=2, accumulate_grad_batches=2, **options)
    run.fit(module, ResumableLoader(8), validation_loader())
    torch.save(module.model.state_dict(), folder / "weights.pt")
    norm = run.strategy.gradient_norm if isinstance(run.strategy, Zero) else run.callback_metrics["gradient_norm"]
    (folder / "norm.txt").write_text(f"{float(norm)}")


def train_with_zero(folder: Path, stage: int) -> None:
    """Train in a separate process, and record which files are synced and renamed, in order."""
    done, fsync, replace = [], os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        done.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        fsync(descriptor)

    def noted_replace(source: str, target: str) -> None:
        done.append(f"rename to {os.path.basename(target)}")
        replace(source, target)

    os.fsync, os.replace = noted_fsync, noted_replace  # type: ignore[assignment]
    train(folder, strategy=Zero(stage=stage), devices=1)
    (folder / "done.txt").write_text("\n".join(done))


TRAIN_WITH_ZERO = """
import sys
from pathlib import Path
from tests.zoo.train.test_zero import train_with_zero
train_with_zero(Path(sys.argv[1]), int(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_accumulated_and_clipped_gradients_are_those_of_one_device(stage: int, tmp_path: Path):
    """With SGD the weights show the size of a gradient, which AdamW's hardly do."""
    for name in ("alone", "zero"):
        (tmp_path / name).mkdir()
    program = tmp_path / "program.py"
    program.write_text(TRAIN_WITH_ZERO)
    # in a process, with which DeepSpeed's choice of a device and the process group end
    process = subprocess.Popen([forked_python(), str(program), str(tmp_path / "zero"), str(stage)])
    train(tmp_path / "alone")
    assert process.wait(600) == 0
    done = (tmp_path / "zero" / "done.txt").read_text().splitlines()
    named = next(i for i, event in enumerate(done) if event.startswith("rename to ") and event.endswith(".ckpt"))
    shards = [path.name for path in (tmp_path / "zero").rglob("shards-*/*.pt")]
    assert shards
    assert not list((tmp_path / "zero").rglob("*.py"))  # DeepSpeed's script that converts them
    assert {f"sync {name}" for name in shards} <= set(done[:named])  # before the checkpoint names them
    alone, zero = (torch.load(tmp_path / name / "weights.pt") for name in ("alone", "zero"))
    torch.testing.assert_close(zero, alone, rtol=1e-5, atol=1e-6)
    norms = [float((tmp_path / name / "norm.txt").read_text()) for name in ("alone", "zero")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] > 0.2  # so that they were clipped
