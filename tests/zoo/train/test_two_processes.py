"""What two processes write down together: DDP between two CPUs, in processes that are started once for all tests."""

import json
import logging
import os
import shutil
import socket
import threading
import time
from collections import deque
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
from torch.distributed.checkpoint import FileSystemWriter

from kernels import UserError, documents
from mixers import GLA, ContextParallel, GatedDeltaNet, Site
from mixers.context_parallel import run_selective_scan
from reproductions import step_times
from reproductions.step_times import StepTimes
from tests.zoo.tiny import (
    VOCAB,
    Batches,
    ByteTokenizer,
    LossLog,
    ResumableLoader,
    batch,
    pretraining,
    trainer,
    validation_loader,
)
from tests.zoo.train.test_captured_step import Repeated
from zoo import LanguageModel
from zoo.checkpoints.format import read_checkpoint, read_whole_checkpoint
from zoo.data.batch import NO_LOSS, Batch
from zoo.data.resumable import ResumableData
from zoo.files.hashing import digest
from zoo.lm import Uniform
from zoo.lm.classifier import Classifier
from zoo.train import agreement, shards
from zoo.train import module as learning
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.callbacks.captured_steps import CapturedSteps
from zoo.train.callbacks.checkpoints import Checkpoints
from zoo.train.callbacks.loss_guard import LossGuard
from zoo.train.captured_memory import GradientAverage
from zoo.train.captured_step import CapturedStep
from zoo.train.fsdp2 import FSDP2
from zoo.train.metrics_file import read_metrics
from zoo.train.module import Pretraining
from zoo.train.optim import Optimisation

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


class ResumableShare(ResumableLoader):
    """A process's rows of the batches; a checkpoint has the position."""

    def __init__(self, rank: int, count: int) -> None:
        super().__init__(100)
        self.rank, self.count = rank, count

    def __iter__(self) -> Iterator[Batch]:
        for tokens, labels, _ in super().__iter__():
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


class Memory(L.Callback):
    """Notes whether the model is in DDP, and whether gradients are averaged where the backward pass wrote them."""

    def __init__(self) -> None:
        self.wrapped, self.in_place, self._gradients = set[bool](), set[bool](), list[int]()

    def on_after_backward(self, trainer, pl_module):
        self._gradients = self.of(pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.wrapped.add(trainer.strategy.model is not pl_module)
        self.in_place.add(self.of(pl_module) == self._gradients)

    def of(self, module: torch.nn.Module) -> list[int]:
        return [parameter.grad.data_ptr() for parameter in module.parameters()]


def train_captured(folder: Path, rank: int) -> None:
    """The same run in eager steps and in captured ones; in both a gradient of one process is NaN at a step."""
    recorder = Repeated()
    for name, callbacks in (("eager", []), ("captured", [CapturedSteps(recorder)])):
        module, guard, memory = pretraining(learning_rate=2**-6), LossGuard(), Memory()
        each = [guard, memory, *callbacks, *([Corrupts()] if rank == 1 else [])]
        trainer(folder / name, each, strategy="ddp", devices=2, **OPTIONS).fit(
            module, Share(rank, 2), validation_loader()
        )
        saved = {"skipped": guard.skipped, "parts": recorder.recorded, "weights": module.model.state_dict()}
        torch.save(saved | {"memory": (memory.wrapped, memory.in_place)}, folder / f"{name}-{rank}.pt")


class TwoDocuments:
    """Rows of two documents; those of the processes differ."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            tokens, labels, *_ = batch(2 * number + self.rank)
            yield Batch(tokens[:1], labels[:1], torch.tensor([0, 5, tokens.shape[1]]))


def train_classifier(folder: Path, rank: int) -> None:
    """A run whose steps are not captured only because of its batches."""
    module, recorder = pretraining(learning_rate=2**-6), Repeated()
    module.model.head = Classifier(8, VOCAB)
    run = trainer(folder, [CapturedSteps(recorder)], max_steps=STEPS, strategy="ddp", devices=2)
    run.fit(module, TwoDocuments(rank))
    saved = {"parts": recorder.recorded, "weights": module.model.state_dict()}
    torch.save(saved, folder / f"classifier-{rank}.pt")


def refuse_at_start(folder: Path, rank: int) -> None:
    """A run of two processes, in one of which memory is set so that nothing can be captured."""
    recorder, said = Repeated(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zoo.train.callbacks.captured_steps")
    log.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        run = trainer(folder / "start", [CapturedSteps(recorder)], strategy="ddp", devices=2, **OPTIONS)
        run.fit(pretraining(), Share(rank, 2), validation_loader())
    log.removeHandler(handler)
    Path(folder, f"start-{rank}.json").write_text(json.dumps({"recorded": recorder.recorded, "said": said}))


# starts of documents after the first: they begin in either part or with the second one, span both, or are empty
STARTS = ((5,), (8,), (3, 3), (2, 8, 11), (), (9, 14), (8, 8), (1, 7), (0, 8, 12), (4,), (7, 9), (6, 15))


class Sequences(ResumableData):
    """Rows of 16 and of 15 tokens, of which the first process holds eight each; some tokens have no label."""

    def __init__(self, packed: bool = False) -> None:
        super().__init__(batch_size=4, num_workers=0, seed=0)
        self.packed = packed

    def train_dataloader(self) -> Any:
        return Batches(*(self.rows(number) for number in range(STEPS * ACCUMULATED)))

    def val_dataloader(self) -> Any:
        return Batches(self.rows(100), self.rows(101))

    def identity(self) -> dict[str, Any]:
        return {}

    def rows(self, number: int) -> Batch:
        tokens, labels = (part.clone() for part in batch(number)[:2])
        length, cu_seqlens = 15 + (number % 3 != 1), None
        labels[0, number % 3 + 1 :] = NO_LOSS
        if self.packed:
            tokens, labels = tokens[:1], labels[:1]
            cu_seqlens = torch.tensor([0, *STARTS[number % len(STARTS)], length], dtype=torch.int32)
        return Batch(tokens[:, :length], labels[:, :length], cu_seqlens)


def train_sharing(folder: Path, rank: int) -> None:
    """Runs whose processes share each sequence, in eager and in captured steps; one of two blocks is recomputed."""
    for case in ("rows", "packed"):
        recorder, options = Repeated(), OPTIONS | {"num_sanity_val_steps": 0}
        for name, capture in (("eager", []), ("captured", [CapturedSteps(recorder, automatic=True)])):
            torch.manual_seed(0)
            model = LanguageModel(Uniform(GatedDeltaNet), vocab_size=VOCAB, hidden_size=16, num_heads=2, num_layers=2)
            optim = Optimisation(warmup_steps=2, learning_rate=2**-6, gradient_clip=0.5)
            module, log = Pretraining(model, optim, config={}, context_parallel=2), LossLog()
            callbacks = [log, CheckpointedBlocks(2), *capture]
            run = trainer(folder / case / name, callbacks, strategy="ddp", devices=2, **options)
            run.fit(module, datamodule=Sequences(case == "packed"))
            saved = {"losses": log.losses, "parts": recorder.recorded, "weights": module.model.state_dict()}
            torch.save(saved | {"positions": module.loss_by_position}, folder / f"{case}-{name}-{rank}.pt")


class Wrong(Repeated):
    """Replays add to the loss."""

    def record(self, step: Callable[[], Any]) -> Callable[[], Any]:
        replay = super().record(step)

        def wrong() -> Any:
            result = replay()
            return (result[0] + 1, *result[1:]) if isinstance(result, tuple) else result

        return wrong


def refuse(folder: Path, rank: int) -> None:
    """Steps on sequences of two lengths that one of two processes which share them cannot capture."""
    sharing, results = ContextParallel(), {}
    recorders: dict[str, tuple[Repeated, Repeated] | None] = {
        "eager": None,
        "first pass": (Repeated(), Repeated(fails_at=2)),
        "check": (Wrong(), Repeated()),
        "norm": (Repeated(fails_at=3), Repeated()),
    }
    for case, pair in recorders.items():
        torch.manual_seed(0)
        mixer = GLA(Site(hidden_size=64, num_heads=2, layer=0, num_layers=1))

        def loss(x: torch.Tensor, mixer: torch.nn.Module = mixer) -> tuple[torch.Tensor]:
            part = sharing.of(x.shape[1])
            own = part.take(x)
            y, _ = mixer(own, context_parallel=part)
            return (part.mean(y.square().sum(), torch.tensor(own.numel())),)

        average, recorder = GradientAverage(), Repeated(fails_at=1) if pair is None else pair[rank]
        step = CapturedStep(loss, mixer.parameters(), recorder, average, sharing)
        numbers, refusals = [], []
        for number, length in enumerate((8, 8, 7, 8)):
            x = torch.randn(2, length, 64, generator=torch.Generator().manual_seed(number))
            if pair is not None:
                step.prepare(x)
            mixer.zero_grad()
            value = step(x)[0] if pair is not None else loss(x)[0]
            value.backward()
            numbers.append((value.item(), step.gradient_norm().item()))
            refusals.append(step.refused)
        results[case] = {"numbers": numbers, "refusals": refusals}
    sharing.finish()
    torch.save(results, folder / f"refusals-{rank}.pt")


def capture_long(folder: Path, rank: int) -> None:
    """Steps that depend on whether a part of the row has a document of five tokens, in eager and captured steps."""
    sharing, weight, results = ContextParallel(), torch.nn.Parameter(torch.ones(())), {}

    def loss(x: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor]:
        part = sharing.of(x.shape[1], cu_seqlens)
        own, packed = part.take(x), documents(part.cu_seqlens, 8)
        total, _ = run_selective_scan(weight * own, own, cu_seqlens=part.cu_seqlens, context_parallel=part)
        return (part.mean(total.sum() * (2 if packed.reaches(5) else 1), torch.tensor(8)),)

    for case in ("eager", "captured"):
        recorder, numbers = Repeated(), []
        step = CapturedStep(loss, [weight], recorder, None, sharing)
        for number, starts in enumerate(((4, 12), (2, 12), (4, 9), (3, 13), (1, 8), (4, 12), (2, 9), (5, 11))):
            x = -torch.rand(1, 16, 4, generator=torch.Generator().manual_seed(number))
            cu_seqlens, weight.grad = torch.tensor([0, *starts, 16]), None
            if case == "captured":
                step.prepare(x, cu_seqlens=cu_seqlens)
            value = step(x, cu_seqlens=cu_seqlens)[0]
            value.backward()
            numbers.append((value.item(), weight.grad.item()))
        results[case] = {"numbers": numbers, "parts": recorder.recorded, "refused": step.refused}
    sharing.finish()
    torch.save(results, folder / f"long-{rank}.pt")


class SlowDisk(L.Callback):
    """Shards are written only when training is two steps further than their checkpoint, or complete."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.step, self.further, self.behind = 0, threading.Condition(), list[int]()
        self.saved = deque[int]()  # steps of the checkpoints that are not yet written
        write = FileSystemWriter.write_data

        def write_late(*args: Any) -> Any:
            with self.further:
                step = self.saved.popleft()
                self.further.wait_for(lambda: self.step >= min(step + 2, STEPS), timeout=60)
                self.behind.append(self.step - step)
            return write(*args)

        patch.setattr(FileSystemWriter, "write_data", write_late)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.saved.append(trainer.global_step)

    def on_train_batch_end(self, trainer, pl_module, *_):
        with self.further:
            self.step = trainer.global_step
            self.further.notify_all()


def fit_sharded(
    folder: Path, rank: int, *callbacks: L.Callback, in_background: bool, **options: Any
) -> dict[int, float]:
    """A run by FSDP2 whose processes write shards after each third step; returns its losses."""
    module = pretraining()
    module.model.layers = torch.nn.ModuleList()
    saving = Checkpoints(every_n_steps=3, keep_every_n_steps=3, in_background=in_background)
    each = [*callbacks, log := LossLog()]
    strategy = FSDP2(sharded_checkpoints=True)
    run = trainer(folder, each, STEPS, saving, strategy=strategy, devices=2, val_check_interval=STEPS)
    run.fit(module, ResumableShare(rank, 2), validation_loader(), **options)
    return log.losses


def fill_disk(patch: pytest.MonkeyPatch, number: int) -> None:
    """Let this process's shards fail to be written for the n-th time."""
    calls, write = iter(range(1, 100)), FileSystemWriter.write_data

    def write_unless_full(*args: Any) -> Any:
        if next(calls) == number:
            raise OSError(28, os.strerror(28))
        return write(*args)

    patch.setattr(FileSystemWriter, "write_data", write_unless_full)


def train_sharded(folder: Path, rank: int) -> None:
    """One run that waits for its checkpoints and one that does not, the rest of one, and two with a full disk."""
    losses = {"waits": fit_sharded(folder / "waits", rank, in_background=False)}
    with pytest.MonkeyPatch.context() as patch:
        slow = SlowDisk(patch)
        if rank == 0:  # a kill leaves the disk as it is at some moment
            moments, seal = iter(range(100)), shards.save_sealed

            def copied_first(*args: Any) -> None:
                shutil.copytree(folder / "late" / "checkpoints", folder / f"moment-{next(moments)}")
                seal(*args)

            patch.setattr(shards, "save_sealed", copied_first)
        losses["late"] = fit_sharded(folder / "late", rank, slow, in_background=True)
    middle = folder / "late" / "checkpoints" / "step-00000003.ckpt"
    losses["rest"] = fit_sharded(folder / "rest", rank, in_background=True, ckpt_path=middle)
    errors = {}
    for full in (3, STEPS):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                fill_disk(patch, full // 3)
            log = LossLog()
            with pytest.raises(UserError) as raised:
                fit_sharded(folder / f"full-{full}", rank, log, in_background=True)
            errors[full] = (str(raised.value), max(log.losses))
    torch.save({"losses": losses, "behind": slow.behind, "errors": errors}, folder / f"rank-{rank}.pt")


def average(folder: Path, rank: int) -> None:
    """Means of gradients that both processes have, and of some that only the first one has."""
    means, errors = GradientAverage(), []
    for number in range(2):
        means([torch.full((3,), float(rank + number)), None, None if number and rank else torch.ones(2)])
    results, only_first = means.results, None if rank else torch.ones(1)
    places = [result.data_ptr() for result in results if result is not None]
    assert (places[1] - places[0]) % 512 == 0  # as gradients with memory of their own: norms sum them in the same order
    with pytest.raises(UserError):
        means([torch.ones(3), torch.ones(1), torch.ones(2)])
    means.forget()
    checked = GradientAverage()
    checked.allocate([None])
    for each, gradients in (
        (means, [only_first, torch.ones(2)]),
        (GradientAverage(), [only_first]),
        (checked, [only_first]),
    ):
        with pytest.raises(UserError) as raised:
            each(gradients)
        errors.append(str(raised.value))
    torch.save({"means": results, "errors": errors}, folder / f"means-{rank}.pt")


def stop_alone(folder: Path, rank: int) -> None:
    """Steps that the first process stops to capture at a batch that gives no gradient to a parameter."""
    weights, gradients = [torch.nn.Parameter(torch.ones(size)) for size in (2, 3)], []

    def loss(x: torch.Tensor) -> tuple[torch.Tensor]:
        total = (x * weights[0]).sum()
        return (total + (x.mean() * weights[1]).sum() if x.shape[1] > 8 else total,)

    step = CapturedStep(loss, weights, Repeated(), GradientAverage())
    for number, length in enumerate((16, 16, 16 if rank else 8, 16)):
        x = torch.full((1, length, 2), float(number + 1 + rank))
        step.prepare(x)
        for weight in weights:
            weight.grad = None
        step(x)[0].backward()
        step.gradient_norm()
        gradients.append([weight.grad.tolist() for weight in weights])
    torch.save({"gradients": gradients, "refused": step.refused}, folder / f"alone-{rank}.pt")


class Text(Sequences):
    """Rows of a text that may be another one on each node, at another path."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.content = content

    def identity(self) -> dict[str, Any]:
        return {"sequence_length": 15, "data_hash": self.content}


class OtherBytes(ByteTokenizer):
    """Another tokenizer of the same size."""

    def to_json(self) -> str:
        return '{"bytes": false}'


def compare(folder: Path, rank: int) -> None:
    """Runs whose processes differ in one thing, and one whose processes do not; writes what each says."""
    errors = {}
    for case in ("nothing", "text", "tokenizer", "optim", "code"):
        other = rank == 1
        module = pretraining(tokenizer=OtherBytes() if other and case == "tokenizer" else ByteTokenizer())
        module.config = {
            "data": {"class_path": "Text", "init_args": {"path": f"/disk{rank}/text"}},
            "optim": {"learning_rate": 2e-3 if other and case == "optim" else 1e-3},
        }
        log = LossLog()
        run = trainer(folder / case, [log], max_steps=1, strategy="ddp", devices=2, num_sanity_val_steps=0)
        with pytest.MonkeyPatch.context() as patch:
            if other and case == "code":
                patch.setattr(agreement, "code_digest", lambda: "edited")
            try:
                run.fit(module, datamodule=Text("b" if other and case == "text" else "a"))
                errors[case] = ""
            except UserError as error:
                errors[case] = str(error)
        assert bool(log.losses) == (case == "nothing")
    Path(folder, f"compared-{rank}.json").write_text(json.dumps(errors))


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
        patch.setattr(
            learning, "WITHOUT_METRICS", (*learning.WITHOUT_METRICS, StepTimes)
        )  # as if it were the project's
        train(Path(folder, "two"), rank, 2)
    with pytest.MonkeyPatch.context() as patch:
        clock.of(rank, patch)
        for late in range(2):
            train(Path(folder, f"late-{late}"), rank, 2, *([Late(rank, clock)] if rank == late else []))
    train_corrupted(Path(folder, "corrupted"), rank)
    train_captured(Path(folder), rank)
    train_classifier(Path(folder), rank)
    refuse_at_start(Path(folder), rank)
    train_sharing(Path(folder, "sharing"), rank)
    refuse(Path(folder), rank)
    capture_long(Path(folder), rank)
    average(Path(folder), rank)
    stop_alone(Path(folder), rank)
    compare(Path(folder), rank)
    train_sharded(Path(folder, "sharded"), rank)
    Path(folder, f"sums-{rank}.json").write_text(json.dumps(shapes))
    Path(folder, f"broadcasts-{rank}.json").write_text(json.dumps(broadcasts))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs: `one` of one process, `two`, `late-0` and `late-1` of two, of which the named one is late."""
    folder = tmp_path_factory.mktemp("processes")
    clock = SharedClock()  # held until the processes have started
    mp.get_context("forkserver").set_forkserver_preload([__name__])  # imported once for both processes
    context = mp.start_processes(work, (str(folder), clock), nprocs=2, start_method="forkserver", join=False)
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


def test_processes_that_differ_do_not_train_together(found: Path) -> None:
    """Both say in what, and neither trains a step; where their data is may differ."""
    first, second = (json.loads((found / f"compared-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first.pop("nothing") == ""
    host = socket.gethostname()
    ends = "; all processes must have the same data, config and code"
    for case, name, values in (
        ("text", "data.data_hash", ('"a"', '"b"')),
        ("tokenizer", "the tokenizer", tuple(digest(x.to_json().encode()) for x in (ByteTokenizer(), OtherBytes()))),
        ("optim", "optim.learning_rate", ("0.001", "0.002")),
        ("code", "the code of this project", (agreement.code_digest(), "edited")),
    ):
        said = f"{values[0]} in process 0 on {host}, {values[1]} in process 1 on {host}"
        assert first[case] == f"{name} differs between processes: {said}{ends}"


def test_no_process_captures_if_one_cannot(found: Path) -> None:
    """Both name the reason of the one that cannot."""
    first, second = (json.loads((found / f"start-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["recorded"] == 0
    (line,) = first["said"]
    assert line.startswith("cuda_graph: the training step runs eagerly: ")
    assert line.endswith("requires NCCL_GRAPH_REGISTER=0")


def test_captured_steps_average_the_gradients(found: Path) -> None:
    runs = [torch.load(found / f"{name}-{rank}.pt") for name in ("eager", "captured") for rank in range(2)]
    assert [run["skipped"] for run in runs] == [1] * 4
    # two passes for each of two batches, exchange, norm, clipping, validation; PyTorch's AdamW is not captured on a CPU
    assert [run["parts"] for run in runs] == [0, 0, 8, 8]
    assert [run["memory"] for run in runs[2:]] == [({False}, {True})] * 2
    for run in runs[1:]:
        for name, weight in runs[0]["weights"].items():
            assert torch.equal(weight, run["weights"][name]), name
    rows = [read_metrics(found / name / "metrics.jsonl") for name in ("eager", "captured")]
    keys = ("train_loss", "gradient_norm", "val_loss")
    losses, captured = ([[row.get(key) for key in keys] for row in each] for each in rows)
    assert repr(losses) == repr(captured)


def test_gradients_that_only_one_process_has_are_an_error_in_both(found: Path) -> None:
    for rank in range(2):
        saved = torch.load(found / f"means-{rank}.pt")
        first, none, last = saved["means"]
        assert none is None
        assert (first.tolist(), last.tolist()) == ([1.5] * 3, [0.5] * 2)  # a gradient that is missing later is zero
        assert [error.startswith("cuda_graph: captured steps of several") for error in saved["errors"]] == [True] * 3


def test_a_process_that_stops_to_capture_alone_exchanges_the_same_gradients(found: Path) -> None:
    first, second = (torch.load(found / f"alone-{rank}.pt") for rank in range(2))
    assert first["refused"].startswith("batches of different shapes give gradients to different parameters")
    assert second["refused"] is None
    assert first["gradients"] == second["gradients"]
    means = [[24.0, 24.0], [40.0, 40.0], [44.0, 44.0], [72.0, 72.0]]  # of 8 tokens times 3, and 16 tokens times 4
    assert [a for a, _ in first["gradients"]] == means
    assert [b for _, b in first["gradients"]] == [[1.5] * 3, [2.5] * 3, [2.0] * 3, [4.5] * 3]


def test_eager_steps_average_the_gradients_after_all(found: Path) -> None:
    first, second = (torch.load(found / f"classifier-{rank}.pt") for rank in range(2))
    assert [run["parts"] for run in (first, second)] == [0, 0]
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name


@pytest.mark.parametrize("case", ["rows", "packed"])
def test_processes_that_share_sequences_capture_the_same_steps(found: Path, case: str) -> None:
    runs = [torch.load(found / "sharing" / f"{case}-{name}-{n}.pt") for name in ("eager", "captured") for n in range(2)]
    assert len(runs[0]["losses"]) > 2
    # exchange, norm, clipping, and two passes for each of two lengths and places in a step, of which packed rows use
    # ten with room for one, two or four documents in each part; validation runs eagerly
    parts = 23 if case == "packed" else 11
    assert [run.pop("parts") for run in runs] == [0, 0, parts, parts]
    for run in runs[1:]:
        weights = run.pop("weights")
        assert all(torch.equal(weight, weights[name]) for name, weight in runs[0]["weights"].items())
        assert repr(run) == repr({key: runs[0][key] for key in run})  # positions without labels have nan


def test_processes_that_share_sequences_refuse_together(found: Path) -> None:
    first, second = (torch.load(found / f"refusals-{rank}.pt") for rank in range(2))
    eager, reason = first["eager"]["numbers"], "operation not permitted when stream is capturing"
    for process in (first, second):
        assert [each["numbers"] for each in process.values()] == [eager] * 4
        assert process["first pass"]["refusals"] == [reason] * 4
        (wrong,) = set(process["check"]["refusals"])
        assert wrong.startswith("a replay has the loss")
    # the norm of one process: the other one replays until the next length
    assert first["norm"]["refusals"] == [reason] * 4
    assert second["norm"]["refusals"] == [None, None, reason, reason]


def test_processes_agree_on_the_graph_of_a_row(found: Path) -> None:
    """Although each part has long documents in other rows; its launches follow the longest document of all parts."""
    processes = [torch.load(found / f"long-{rank}.pt") for rank in range(2)]
    assert processes[0]["eager"]["numbers"] != processes[1]["eager"]["numbers"]  # gradients, before they are averaged
    for process in processes:
        # long documents in one or both parts, and in neither one
        assert process["captured"] == process["eager"] | {"parts": 2 * 2}


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


@pytest.fixture(scope="module")
def sharded(found: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The folder of the runs by FSDP2, and what each process has seen of them."""
    folder = found / "sharded"
    first, second = (torch.load(folder / f"rank-{rank}.pt") for rank in range(2))
    return folder, first, second


def test_shards_written_in_the_background_are_those_of_their_step(sharded: tuple[Path, Any, Any]) -> None:
    folder, *processes = sharded
    for process in processes:
        assert process["behind"][0] >= 2
        assert process["losses"]["late"] == process["losses"]["waits"]
    for name in ("step-00000003.ckpt", "step-00000006.ckpt", "last.ckpt", "best.ckpt"):
        late, waits = (read_whole_checkpoint(folder / run / "checkpoints" / name) for run in ("late", "waits"))
        assert late["global_step"] == waits["global_step"] == (3 if "3" in name else STEPS)
        torch.testing.assert_close(late["state_dict"], waits["state_dict"], rtol=0, atol=0)
        torch.testing.assert_close(late["optimizer_states"], waits["optimizer_states"], rtol=0, atol=0)


def test_shards_written_in_the_background_are_continued_bitwise(sharded: tuple[Path, Any, Any]) -> None:
    for process in sharded[1:]:
        losses = process["losses"]
        assert losses["rest"] == {step: loss for step, loss in losses["waits"].items() if step > 3}


def test_one_process_continues_shards_written_by_two(sharded: tuple[Path, Any, Any], tmp_path: Path) -> None:
    folder, *processes = sharded
    log = LossLog()
    run = trainer(tmp_path, [log], STEPS)
    middle = folder / "late" / "checkpoints" / "step-00000003.ckpt"
    run.fit(pretraining(), ResumableShare(0, 1), validation_loader(), ckpt_path=middle)
    assert list(log.losses) == [4, 5, 6]
    for name, weight in read_whole_checkpoint(folder / "waits" / "checkpoints" / "last.ckpt")["state_dict"].items():
        torch.testing.assert_close(run.lightning_module.state_dict()[name], weight, rtol=0, atol=1e-6)


def test_a_kill_while_shards_are_written_leaves_the_checkpoint_before(sharded: tuple[Path, Any, Any]) -> None:
    """Copy of the folder after all shards are written and before a checkpoint names them."""
    folder, *_ = sharded
    moments = [folder / f"moment-{number}" for number in range(3)]  # at steps 3 and 6, and after the validation
    assert not list(moments[0].glob("*.ckpt"))
    for moment, step in zip(moments[1:], (3, 6), strict=True):
        assert read_whole_checkpoint(moment / "last.ckpt")["global_step"] == step
    assert [len(list(moment.glob("shards-*"))) for moment in moments] == [1, 2, 3]
    assert len(list((folder / "late" / "checkpoints").glob("shards-*"))) == 3  # steps 3 and 6, and with the validation


@pytest.mark.parametrize(("full", "noticed", "left"), [(3, 6, 0), (6, 6, 3)])
def test_a_full_disk_of_one_process_is_an_error_in_all(
    full: int, noticed: int, left: int, sharded: tuple[Path, Any, Any]
) -> None:
    folder, *processes = sharded
    for process in processes:
        said, step = process["errors"][full]
        assert "last.ckpt cannot be written: " in said
        assert step == noticed
    checkpoints = folder / f"full-{full}" / "checkpoints"
    assert len(list(checkpoints.glob("shards-*"))) == len(list(checkpoints.glob("step-*.ckpt"))) == (left > 0)
    if left:
        assert read_whole_checkpoint(checkpoints / "last.ckpt")["global_step"] == left
