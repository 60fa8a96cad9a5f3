"""What two processes write down together: DDP between two CPUs, in processes that are started once for all tests."""

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.zoo.tiny import batch, pretraining, trainer, validation_loader
from tests.zoo.train.test_captured_step import Repeated
from zoo.checkpoints.format import read_checkpoint
from zoo.data.batch import NO_LOSS, Batch
from zoo.train.callbacks import step_times
from zoo.train.callbacks.captured_steps import CapturedSteps
from zoo.train.callbacks.checkpoints import Checkpoints
from zoo.train.callbacks.loss_guard import LossGuard
from zoo.train.callbacks.step_times import StepTimes
from zoo.train.metrics_file import read_metrics

pytestmark = pytest.mark.slow

STEPS, EVERY, ACCUMULATED = 6, 2, 2
OPTIONS: dict[str, Any] = {"log_every_n_steps": EVERY, "accumulate_grad_batches": ACCUMULATED, "max_steps": STEPS}


class Share:
    """A process's rows of the batches, whose first one has few labels."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            tokens, labels = (part.clone() for part in batch(number)[:2])
            labels[0, number % 3 + 1 :] = NO_LOSS
            yield Batch(*(part.chunk(self.count)[self.rank] for part in (tokens, labels)))


class SharedClock:
    """A clock of two processes that goes on only when one of them is late, and how many gradients each has computed."""

    def __init__(self) -> None:
        context = mp.get_context("spawn")
        self.seconds = context.Value("d", 0.0)
        self.computed = [context.Value("q", 0) for _ in range(2)]

    def of(self, rank: int, patch: pytest.MonkeyPatch) -> None:
        """Let the times of this process be those of the clock."""
        patch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: self.seconds.value))
        when_computed = step_times.when_computed

        def counted(loss: torch.Tensor, do: Callable[[], None]) -> None:
            def done() -> None:
                do()
                self.computed[rank].value += 1

            when_computed(loss, done)

        patch.setattr(step_times, "when_computed", counted)


class Late(L.Callback):
    """A process that takes a second longer for its gradients than the other one, which waits for them by then."""

    def __init__(self, rank: int, clock: SharedClock) -> None:
        self.rank, self.clock = rank, clock

    def on_before_backward(self, trainer, pl_module, loss):
        loss.register_hook(self.wait)

    def wait(self, gradient: torch.Tensor) -> None:
        own, other = self.clock.computed[self.rank], self.clock.computed[1 - self.rank]
        while other.value <= own.value:
            time.sleep(0.001)
        self.clock.seconds.value += 1


def train(folder: Path, rank: int, count: int, *late: Late) -> None:
    """A run whose parameters hardly change: processes with unequal numbers of labels train another mean."""
    strategy = {"strategy": "ddp", "devices": count} if count > 1 else {}
    callbacks = [StepTimes(), *late]
    module = pretraining(learning_rate=1e-9)
    saving = Checkpoints(every_n_steps=3, in_background=True)
    trainer(folder, callbacks, checkpoints=saving, **OPTIONS, **strategy).fit(
        module, Share(rank, count), validation_loader()
    )


class Corrupts(L.Callback):
    """Makes a gradient of this process NaN at step 3, after the processes have averaged their gradients."""

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 2:
            next(pl_module.parameters()).grad[0, 0] = float("nan")


def train_corrupted(folder: Path, rank: int) -> None:
    """A run of two processes, in one of which a gradient is NaN; writes its weights and how many steps it skipped."""
    module, guard = pretraining(), LossGuard()
    callbacks = [guard, *([Corrupts()] if rank == 1 else [])]
    trainer(folder, callbacks, max_steps=STEPS, strategy="ddp", devices=2).fit(
        module, Share(rank, 2), validation_loader()
    )
    torch.save({"skipped": guard.skipped, "weights": module.model.state_dict()}, folder / f"rank-{rank}.pt")


def train_captured(folder: Path, rank: int) -> None:
    """The same run in eager steps and in captured ones; in both a gradient of one process is NaN at a step."""
    recorder = Repeated()
    for name, callbacks in (("eager", []), ("captured", [CapturedSteps(recorder)])):
        module, guard = pretraining(learning_rate=2**-6), LossGuard()
        each = [guard, *callbacks, *([Corrupts()] if rank == 1 else [])]
        trainer(folder / name, each, strategy="ddp", devices=2, **OPTIONS).fit(
            module, Share(rank, 2), validation_loader()
        )
        saved = {"skipped": guard.skipped, "parts": recorder.recorded, "weights": module.model.state_dict()}
        torch.save(saved, folder / f"{name}-{rank}.pt")


def work(rank: int, folder: str, clock: SharedClock) -> None:
    """One process of two."""
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")  # Lightning starts no others then
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=5))
    shapes, all_reduce = [], dist.all_reduce
    broadcasts, broadcast = [], dist.broadcast

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.is_floating_point():  # signals are agreed upon at each step, and nobody waits for that
            shapes.append(list(x.shape))
        return all_reduce(x, *args, **kwargs)

    def noted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        broadcasts.append(list(x.shape))
        return broadcast(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", counted)
        patch.setattr(dist, "broadcast", noted)
        train(Path(folder, "two"), rank, 2)
    with pytest.MonkeyPatch.context() as patch:
        clock.of(rank, patch)
        for late in range(2):
            train(Path(folder, f"late-{late}"), rank, 2, *([Late(rank, clock)] if rank == late else []))
    train_corrupted(Path(folder, "corrupted"), rank)
    train_captured(Path(folder), rank)
    Path(folder, f"sums-{rank}.json").write_text(json.dumps(shapes))
    Path(folder, f"broadcasts-{rank}.json").write_text(json.dumps(broadcasts))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs: `one` of one process, `two`, `late-0` and `late-1` of two, of which the named one is late."""
    folder = tmp_path_factory.mktemp("processes")
    clock = SharedClock()  # held until the processes have started
    context = mp.start_processes(work, (str(folder), clock), nprocs=2, start_method="spawn", join=False)
    train(folder / "one", 0, 1)
    while not context.join():
        pass
    return folder


def test_the_training_loss_is_that_of_all_tokens(found: Path) -> None:
    """Of the step, in all of its batches and processes, wherever the labels are."""
    losses = []
    for run in ("one", "two"):
        rows = [row for row in read_metrics(found / run / "metrics.jsonl") if "train_loss" in row]
        assert [row["step"] for row in rows] == [1, 3, 5]
        assert [row["tokens"] for row in rows] == [64 * ACCUMULATED * step for step in (2, 4, 6)]
        losses.append([row["train_loss"] for row in rows])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    module, expected = pretraining(), []
    for step in (1, 3, 5):
        whole = [given for number, given in enumerate(Share(0, 1)) if number // ACCUMULATED == step]
        logits = torch.cat([module(given.tokens) for given in whole]).flatten(0, 1)
        labels = torch.cat([given.labels for given in whole]).flatten()
        expected.append(torch.nn.functional.cross_entropy(logits, labels).item())
    assert losses[0] == pytest.approx(expected, rel=1e-6)


def test_a_step_that_one_process_must_skip_is_skipped_by_all(found: Path) -> None:
    first, second = (torch.load(found / "corrupted" / f"rank-{rank}.pt") for rank in range(2))
    assert first["skipped"] == second["skipped"] == 1
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
        assert weight.isfinite().all()


def test_captured_steps_average_the_gradients(found: Path) -> None:
    runs = [torch.load(found / f"{name}-{rank}.pt") for name in ("eager", "captured") for rank in range(2)]
    assert [run["skipped"] for run in runs] == [1] * 4
    # two passes for each of two batches, exchange, norm, clipping, validation; PyTorch's AdamW is not captured on a CPU
    assert [run["parts"] for run in runs] == [0, 0, 8, 8]
    for run in runs[1:]:
        for name, weight in runs[0]["weights"].items():
            assert torch.equal(weight, run["weights"][name]), name
    rows = [read_metrics(found / name / "metrics.jsonl") for name in ("eager", "captured")]
    keys = ("train_loss", "gradient_norm", "val_loss")
    losses, captured = ([[row.get(key) for key in keys] for row in each] for each in rows)
    assert repr(losses) == repr(captured)


def test_processes_wait_for_it_only_where_it_is_logged(found: Path) -> None:
    for rank in range(2):
        assert json.loads((found / f"sums-{rank}.json").read_text()).count([2]) == STEPS // EVERY
        assert json.loads((found / f"broadcasts-{rank}.json").read_text()) == []


def test_how_long_the_others_are_waited_for(found: Path) -> None:
    """The numbers are those of the first process, of steps of two batches, after only one of which it waits."""
    times = {}
    for run in ("one", "two", "late-0", "late-1"):
        rows = [row for row in read_metrics(found / run / "metrics.jsonl") if "seconds_backward" in row]
        assert len(rows) == STEPS // EVERY
        times[run] = [row["seconds_communication"] for row in rows if "seconds_communication" in row]
        assert all(seconds <= row["seconds_backward"] for seconds, row in zip(times[run], rows, strict=False))
    assert not times["one"]
    assert all(seconds > 0 for seconds in times["two"])
    assert times["late-0"] == [0.0] * 3
    assert all(1 <= seconds <= 2 for seconds in times["late-1"])


def test_the_first_process_saves_in_the_background(found: Path) -> None:
    alone, together = (read_checkpoint(found / run / "checkpoints" / "last.ckpt") for run in ("one", "two"))
    assert alone["global_step"] == together["global_step"] == STEPS
    for name, tensor in together["state_dict"].items():
        torch.testing.assert_close(tensor, alone["state_dict"][name], atol=1e-6, rtol=0)
