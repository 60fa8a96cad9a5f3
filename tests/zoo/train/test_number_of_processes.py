"""In deterministic mode, training in one, two and four processes gives the same bits."""

import gc
import os
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import kernels
import mixers
from kernels import UserError
from tests.zoo.tiny import VOCAB, pretraining, trainer
from zoo import LanguageModel
from zoo.data.batch import NO_LOSS, Batch
from zoo.data.resumable import ResumableData
from zoo.lm import H1, H2
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.fsdp2 import FSDP2
from zoo.train.metrics import TaskMeans
from zoo.train.module import Pretraining
from zoo.train.optim import Optimisation
from zoo.train.partial_sums import PartialSums

ROWS, LENGTH, PARTS, STEPS = 4, 75, 4, 2
# processes of a run, and how many of them share each sequence
RUNS = {"rows": [(1, 1), (2, 1), (4, 1), (4, 4)], "packed": [(1, 1), (2, 2), (4, 2)]}
STACKS = {
    "rows": H2(mixers.Mamba2, mixers.GatedDeltaNet, partial(mixers.SlidingWindowAttention, window_size=24)),
    "packed": H1(mixers.GLA, mixers.HGRN2),
}


class Samples:
    """Rows with different numbers of labels."""

    def __init__(self, packed: bool) -> None:
        self.packed = packed

    def __len__(self) -> int:
        return 7

    def order(self, positions: np.ndarray, seed: int) -> np.ndarray:
        return positions % len(self)

    def batch(self, indices: list[int]) -> Batch:
        generators = [torch.Generator().manual_seed(index) for index in indices]
        rows = torch.stack([torch.randint(VOCAB, (LENGTH + 1,), generator=generator) for generator in generators])
        tokens, labels = rows[:, :-1], rows[:, 1:].clone()
        for index, row in zip(indices, labels, strict=True):
            row[: 9 * index] = NO_LOSS
        bounds = torch.tensor([0, 30, 30, 38, LENGTH], dtype=torch.int32)  # parts begin after 19, 38 and 57 tokens
        return Batch(tokens, labels, bounds if self.packed else None)


class Rows(ResumableData):
    def __init__(self, batch_size: int, packed: bool) -> None:
        super().__init__(batch_size, num_workers=0, seed=0)
        self.samples = Samples(packed)

    @property
    def train(self) -> Samples:
        return self.samples

    def val_dataloader(self) -> Any:
        return self.evaluation_loader(self.samples)

    def identity(self) -> dict[str, Any]:
        return {}


class Gradients(L.Callback):
    """Loss, gradients and their norm of each step."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for name, parameter in pl_module.named_parameters():
            self.tensors[f"gradient of {name} after step {trainer.global_step}"] = parameter.grad.clone()

    def on_train_batch_end(self, trainer, pl_module, *_):
        for name in ("train_loss", "gradient_norm"):
            if name in trainer.callback_metrics:
                self.tensors[f"{name} of step {trainer.global_step}"] = trainer.callback_metrics[name].clone()


def trained(folder: Path, layout: str, count: int, sharing: int) -> dict[str, Tensor]:
    """Everything that a run of `count` processes computes, by name."""
    groups, log, packed = count // sharing, Gradients(), layout == "packed"
    torch.manual_seed(0)
    layers = 2 if packed else 3
    model = LanguageModel(STACKS[layout], vocab_size=VOCAB, hidden_size=32, num_heads=2, num_layers=layers)
    optim = Optimisation(warmup_steps=1, learning_rate=1e-2, gradient_clip=0.5)
    module = Pretraining(model, optim, config={}, context_parallel=sharing, sequence_parts=PARTS)
    run = trainer(
        folder,
        [log, *([CheckpointedBlocks(2)] if packed else [])],
        STEPS,
        accumulate_grad_batches=ROWS // groups,
        val_check_interval=STEPS * ROWS // groups,
        limit_val_batches=0 if packed else ROWS // groups,
        num_sanity_val_steps=0,
        **({"strategy": "ddp", "devices": count} if count > 1 else {}),
    )
    with kernels.deterministic():
        run.fit(module, datamodule=Rows(groups, packed))
    evaluated = {name: value for name, value in run.callback_metrics.items() if name.startswith("val_")}
    return log.tensors | dict(model.state_dict()) | evaluated


def work(rank: int, folder: str) -> None:
    """One of four processes, which are also the two of other runs, and the one."""
    gc.freeze()  # collections at the start of each run look at its objects only
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")  # Lightning starts no others then
    for count in (4, 2, 1)[: 3 - rank.bit_length()]:
        if count > 1:
            store = dist.FileStore(f"{folder}/store-{count}", count)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timedelta(minutes=5))
        for layout, runs in RUNS.items():
            for sharing in (sharing for processes, sharing in runs if processes == count):
                name = f"{layout}-{count}-{sharing}"
                torch.save(trained(Path(folder, name), layout, count, sharing), f"{folder}/{name}-{rank}.pt")
        if count > 1:
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all processes."""
    folder = tmp_path_factory.mktemp("processes")
    mp.get_context("forkserver").set_forkserver_preload([__name__])  # imported once for all of them
    mp.start_processes(work, (str(folder),), nprocs=4, start_method="forkserver")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "count", "sharing"), [(each, *run) for each in RUNS for run in RUNS[each][1:]])
def test_processes_train_as_one(layout: str, count: int, sharing: int, folder: Path) -> None:
    expected = torch.load(folder / f"{layout}-1-1-0.pt")
    assert {"train_loss of step 2", "gradient_norm of step 2"} <= set(expected)
    assert ("val_loss_position_8" in expected) == (layout == "rows")
    assert len([name for name in expected if name.startswith("gradient of")]) >= 40
    for rank in range(count):
        results = torch.load(folder / f"{layout}-{count}-{sharing}-{rank}.pt")
        assert results.keys() == expected.keys()
        different = [name for name in expected if not torch.equal(results[name], expected[name])]
        assert different == []


@pytest.mark.parametrize("count", range(1, 10))
def test_parts_are_added_in_one_order_by_any_number_of_processes(count: int) -> None:
    """A process gets every second or fourth part, and adds what its neighbours have computed at the same time."""
    parts = torch.randn(4 * count, 1000).exp().unbind()
    sums = []
    for processes in (1, 2, 4):
        total = PartialSums()
        for first in range(0, len(parts), processes):
            together = PartialSums()
            for part in parts[first : first + processes]:
                together.add([part.clone(), None])
            total.add(together.take())
        sums.append(total.take())
    assert all(torch.equal(first, sums[0][0]) and missing is None for first, missing in sums)
    torch.testing.assert_close(sums[0][0], torch.stack(parts).sum(0))
    if count == 3:
        a, b, c = [(w + x) + (y + z) for w, x, y, z in zip(*[iter(parts)] * 4, strict=True)]
        assert torch.equal(sums[0][0], (a + b) + c)


def test_a_gradient_of_one_part_is_the_sum() -> None:
    total, (first, second) = PartialSums(), torch.randn(2, 3)
    total.add([None, first.clone()])
    total.add([second.clone(), None])
    assert [each.tolist() for each in total.take()] == [second.tolist(), first.tolist()]


def test_means_do_not_depend_on_the_order_of_batches() -> None:
    losses = (6 * torch.randn(8, 100)).exp().clamp(max=1e4)
    labels, means = torch.ones(8, 100, dtype=torch.int64), set()
    with kernels.deterministic():
        for size in (1, 2, 3, 8):
            mean = TaskMeans(1)
            for rows in reversed(losses.split(size)):
                mean.update(rows, labels[: len(rows)])
            means.add(mean.compute()[0].item())
    assert len(means) == 1
    assert means.pop() == pytest.approx(losses.double().mean().item(), rel=1e-6)


@pytest.mark.parametrize("parts", [0, 3, 2])
def test_sequences_have_a_power_of_two_of_parts(parts: int) -> None:
    with pytest.raises(UserError, match=f"sequence_parts is {parts}; it must be a power of two and a multiple of con"):
        Pretraining(pretraining().model, Optimisation(), config={}, context_parallel=4, sequence_parts=parts)


def test_what_deterministic_mode_cannot_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pretraining()
    monkeypatch.setattr(Pretraining, "trainer", trainer(tmp_path, strategy="ddp", devices=3))
    module._trainer = module.trainer
    with kernels.deterministic(), pytest.raises(UserError, match="3 processes cannot add the parts of a step in the"):
        module.setup("fit")
    module.sequence_parts = 2
    with pytest.raises(UserError, match="sequence_parts is 2; it needs deterministic_kernels=true, and one"):
        module.setup("fit")
    monkeypatch.setattr(Pretraining, "trainer", trainer(tmp_path, strategy=FSDP2(), devices=2))
    with kernels.deterministic(), pytest.raises(UserError, match="sequence_parts is 2; it needs"):
        module.setup("fit")
