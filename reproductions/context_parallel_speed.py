"""Training speed and memory of one GPU, and of two that share each sequence by context parallelism.

    python reproductions/context_parallel_speed.py --file=reproductions/measured/context_parallel_h100.csv
    python reproductions/context_parallel_speed.py --modes=[captured] --lengths=[65536] --turns=2

Each row is written when it is measured, and a cell that the file has is not measured again, so a run that was stopped
continues. A cell that takes longer than its limit ends the processes, and the next run leaves it out. The last lines
compare two GPUs with one: tokens per second over twice as many, memory, and losses on the same samples.
"""

import gc
import math
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kernels import UserError
from kernels.core.documents import copied
from mixers import ContextParallel
from reproductions import script, write_csv
from reproductions.multi_device import LIMITS, LOW_PRECISION, largest_difference
from zoo import config as configs
from zoo.arguments import check_names
from zoo.data.batch import Batch
from zoo.generation.cuda_graph import Recorder
from zoo.performance.device import described
from zoo.performance.model import build, check_options, read, running
from zoo.performance.timing import Clock
from zoo.performance.training import DOES_NOT_FIT
from zoo.train.adamw import AdamW
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.callbacks.compiled_ahead import compile_ahead
from zoo.train.captured_memory import GradientAverage
from zoo.train.captured_step import CapturedStep
from zoo.train.devices import pick_device
from zoo.train.module import Pretraining, best_precision
from zoo.train.optim import build_optimizer, clip, total_norm

CELL = ("mode", "length", "checkpointing", "layout", "turn", "gpus")
SPEED = ("tokens_per_second", "step_ms", "slowest_ms", "forward_ms", "backward_ms", "update_ms", "peak_gib")
COLUMNS = ("config", "device", "torch", "triton", "precision", *CELL, *SPEED, "reserved_gib", "losses", "note")
UNFINISHED = "the processes ended before the cell was measured"
SPREAD = 1.0  # standard deviation of the logarithm of the lengths of documents
MARKS = 4  # a step: its start, after the forward pass, after the backward pass, after the update
Row = dict[str, Any]


class Cell(NamedTuple):
    """The settings of one row of the CSV."""

    mode: str
    length: int
    checkpointing: bool
    layout: str
    turn: int
    gpus: int

    @property
    def key(self) -> tuple[str, ...]:
        """The fields as the CSV has them."""
        return tuple(str(int(x) if isinstance(x, bool) else x) for x in self)


class Settings(NamedTuple):
    """Settings that all cells have in common."""

    config: list[str]
    precision: str
    document: int
    rows: int
    steps: int
    device: str
    limit: int
    file: Path


class Losses(nn.Module):
    """The losses of a model's training step as a forward pass, which DDP needs."""

    def __init__(self, module: Pretraining, precision: str, device: torch.device) -> None:
        super().__init__()
        self.module, self.running = module, partial(running, precision, device)

    def forward(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, ...]:
        with self.running():
            return self.module.losses(tokens, labels, cu_seqlens)


class Trained:
    """A model in training as `fit` trains it, on one device or on two that share each sequence.

    Attributes:
        captured: The captured step; None if steps run eagerly.
        losses: Those of all steps.
    """

    def __init__(self, cell: Cell, to: Settings, sharing: ContextParallel | None, device: torch.device) -> None:
        parsed = read([*to.config, "optim.learning_rate=1e-4"])
        torch.manual_seed(0)
        self.device, self.clock, self.optim = device, Clock(device), configs.instantiate("optim", parsed)
        self.sharing = sharing
        self.model, self.losses = build(parsed, to.precision, device), list[Tensor]()
        module = Pretraining(self.model, self.optim, config={}, context_parallel=cell.gpus)
        module.sharing = sharing
        self.inner, self.parameters = Losses(module, to.precision, device).to(device), list(self.model.parameters())
        self.computed: nn.Module = self.inner
        if cell.checkpointing:
            for block, forward in CheckpointedBlocks().replaced(self.model):
                block.forward = forward
        self.optimizer, self.captured = build_optimizer(self.model, self.optim), None
        if cell.mode == "captured":
            average = None if sharing is None else GradientAverage()
            self.captured = CapturedStep(
                self.inner, self.parameters, Recorder(device), average, sharing, may_draw=not cell.checkpointing
            )
            if isinstance(self.optimizer, AdamW):
                self.optimizer.replay = partial(self.captured.update, self.optimizer)
        elif sharing is not None:
            self.computed = DistributedDataParallel(self.inner, [device] if device.type == "cuda" else None)

    def prepare(self, batch: Batch) -> None:
        """Compile the kernels of a batch side by side, before its first step; `fit` does so in one process."""
        if self.sharing is None:
            inputs = self._moved(batch)
            compile_ahead(self.model, lambda: self.inner(*inputs)[0])

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.clock.mark()
        tokens, labels, cu_seqlens = self._moved(batch)
        if self.captured is None:
            loss = self.computed(tokens, labels, cu_seqlens)[0]
        else:
            self.captured.prepare(tokens, labels, cu_seqlens=cu_seqlens)
            loss = self.captured(tokens, labels, cu_seqlens=cu_seqlens)[0]
        self.clock.mark()
        loss.backward()
        self.clock.mark()
        self._update()
        self.losses.append(loss.detach())
        self.clock.mark()

    def _moved(self, batch: Batch) -> Batch:
        on_device = Batch(*(None if x is None else x.to(self.device, non_blocking=True) for x in batch))
        if batch.cu_seqlens is not None and on_device.cu_seqlens is not None:
            copied(on_device.cu_seqlens, batch.cu_seqlens)
        return on_device

    def _update(self) -> None:
        """Average the gradients in a captured step (DDP does so in an eager one), clip them and apply them."""
        trained = [parameter for parameter in self.parameters if parameter.grad is not None]
        most = math.inf if self.optim.gradient_clip is None else self.optim.gradient_clip
        if self.captured is None:
            clip(trained, most, total_norm(x.grad for x in trained if x.grad is not None))
        else:
            self.captured.clip(most, self.captured.gradient_norm())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def rows_of(cell: Cell, to: Settings, vocab_size: int) -> list[Batch]:
    """Rows of random tokens on the host, all of one document, or of documents whose lengths are lognormal."""
    draw = torch.Generator().manual_seed(cell.length)
    batches = []
    for _ in range(1 if cell.layout == "whole" else to.rows):
        tokens = torch.randint(vocab_size, (1, cell.length + 1), generator=draw)
        cu_seqlens = None if cell.layout == "whole" else boundaries(cell.length, to.document, draw)
        batches.append(Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), cu_seqlens))
    pinned = to.device == "cuda"
    return [Batch(*(x.pin_memory() if pinned and x is not None else x for x in batch)) for batch in batches]


def boundaries(length: int, document: int, draw: torch.Generator) -> Tensor:
    """Return boundaries [N+1] of documents of `document` tokens on average in a row; the last one is cut off."""
    mean = math.log(document) - SPREAD**2 / 2
    lengths = torch.randn(8 * (length // document + 8), generator=draw).mul(SPREAD).add(mean).exp().long().clamp(min=1)
    ends = lengths.cumsum(0)
    return torch.cat([torch.zeros(1), ends[ends < length], torch.tensor([length])]).int()


def measured(cell: Cell, to: Settings, sharing: ContextParallel | None, device: torch.device) -> Row:
    """Return the numbers of a cell; a note in place of times if there are none."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        trained = Trained(cell, to, sharing, device)
        batches = rows_of(cell, to, trained.model.vocab_size)
        trained.prepare(batches[0])
        for number in range(max(2, len(batches)) + 1):  # all shapes, and the first captured update
            trained.step(batches[number % len(batches)])
        trained.clock.between()
        for number in range(to.steps):
            trained.step(batches[number % len(batches)])
        trained.clock.mark()
    except torch.OutOfMemoryError:
        return {"note": DOES_NOT_FIT}
    row = times(trained.clock.between(), cell.length)
    if trained.captured is not None and trained.captured.refused is not None:
        row["note"] = f"not captured: {trained.captured.refused}"
    if sharing is not None:
        sharing.finish()
    if on_gpu:
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
    return row | {"losses": [loss.item() for loss in trained.losses]}


def times(intervals: Sequence[float], tokens: int) -> Row:
    """Return medians over steps of `tokens` tokens each, from the milliseconds between the marks of all steps."""
    steps = [intervals[at : at + MARKS] for at in range(0, len(intervals), MARKS)]
    forward, backward, update, between = zip(*steps, strict=True)
    milliseconds = statistics.median(map(sum, steps))
    return {
        "tokens_per_second": tokens / milliseconds * 1e3,
        "step_ms": milliseconds,
        "slowest_ms": max(map(sum, steps)),
        "forward_ms": statistics.median(forward),
        "backward_ms": statistics.median(backward),
        "update_ms": statistics.median(map(sum, zip(update, between, strict=True))),
    }


def work(rank: int, cells: Sequence[Cell], to: Settings, store: str) -> None:
    """One process of two: measure all cells, of which the second process has no part in those of one GPU."""
    device = torch.device("cuda", rank) if to.device == "cuda" else torch.device("cpu")
    if to.device == "cuda":
        torch.cuda.set_device(device)
    patience = timedelta(seconds=2 * to.limit)
    backend = "nccl" if to.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=patience)
    group, _ = dist.new_subgroups(2)
    host = dist.new_group(backend="gloo", timeout=patience)
    rows = [dict(row) for row in write_csv.read(to.file)]
    about: Row = {key: value for key, value in described(device).items() if key in ("device", "torch", "triton")}
    about |= {"config": " ".join(to.config), "precision": to.precision}
    for cell in cells:
        signal.alarm(to.limit)  # ends a process that waits for ever, in code of libraries, too
        rows.append(about | dict(zip(CELL, cell.key, strict=True)) | {"note": UNFINISHED})
        if rank == 0:
            write_csv.write(rows, to.file, COLUMNS)
        row = measured(cell, to, ContextParallel(group) if cell.gpus == 2 else None, device) if rank < cell.gpus else {}
        gc.collect()  # graphs and optimisers refer to each other
        if to.device == "cuda":
            torch.cuda.empty_cache()
        both: list[Row] = [{}, {}]
        dist.all_gather_object(both, row, group=host)  # on the host, so that a process which waits leaves its GPU idle
        for key in ("peak_gib", "reserved_gib"):
            if key in row:
                row[key] = max(each[key] for each in both if key in each)
        row["losses"] = " ".join(map(str, row.get("losses", [])))
        rows[-1] |= {"note": None} | row
        if rank == 0:
            write_csv.write(rows, to.file, COLUMNS)
            sys.stdout.write(f"{line(rows[-1])}\n")
            sys.stdout.flush()
    signal.alarm(to.limit)
    dist.destroy_process_group()
    signal.alarm(0)


def line(row: Row) -> str:
    """A row in words."""
    cell, note = " ".join(str(row[key]) for key in CELL), row.get("note")
    if not row.get("tokens_per_second"):
        return f"{cell}: {note}"
    parts = ", ".join(f"{key} {float(row[key]):.1f}" for key in (*SPEED[1:], "reserved_gib") if row.get(key))
    return f"{cell}: {float(row['tokens_per_second']):,.0f} tokens/s, {parts}{f' ({note})' if note else ''}"


def compared(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """Compare the rows of two GPUs with those of one: a line of text, and the largest relative difference of losses."""
    pairs: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        if row.get("tokens_per_second"):
            pairs.setdefault(tuple(str(row[key]) for key in CELL[:-1]), {})[str(row["gpus"])] = row
    for cell, pair in pairs.items():
        if len(pair) < 2:
            continue
        one, two = pair["1"], pair["2"]
        efficiency = float(two["tokens_per_second"]) / (2 * float(one["tokens_per_second"]))
        memory = float(two["peak_gib"]) / float(one["peak_gib"]) if one.get("peak_gib") else math.nan
        losses = ([float(x) for x in row["losses"].split()] for row in (two, one))
        difference = largest_difference(*losses)
        text = (
            f"{' '.join(cell)}: {efficiency:.3f} of twice one GPU, memory {memory:.3f}, losses differ {difference:.1e}"
        )
        yield text, difference


def cells_of(
    modes: Sequence[str], lengths: Sequence[int], recomputed: Sequence[int], layouts: Sequence[str], turns: int
) -> Iterator[Cell]:
    """All cells in their order: turn by turn, in each the modes, lengths and layouts, one GPU before two."""
    for turn in range(turns):
        for mode in modes:
            for length in lengths:
                for layout in layouts:
                    yield from (Cell(mode, length, length in recomputed, layout, turn, gpus) for gpus in (1, 2))


def context_parallel_speed(
    model: list[str] | None = None,
    modes: list[str] | None = None,
    lengths: list[int] | None = None,
    recomputed: list[int] | None = None,
    layouts: list[str] | None = None,
    document: int = 4096,
    rows: int = 4,
    steps: int = 8,
    turns: int = 1,
    precision: str | None = None,
    device: str | None = None,
    limit: int = 90,
    file: str = "runs/context_parallel_speed.csv",
) -> None:
    """Time training steps on one GPU and on two that share each sequence.

    Args:
        model: Configs and `key=value` overrides; null for Gated DeltaNet of 400M parameters.
        modes: Of captured and eager; null for both, on a CPU for eager.
        lengths: Tokens in a sequence, of which a step has one; null for 65536 and 131072.
        recomputed: Lengths with activation checkpointing; null for 131072.
        layouts: Of whole and packed; null for both. Packed rows have documents of random lengths.
        document: Mean length of a document in packed rows.
        rows: Number of packed rows with different boundaries, which are repeated.
        steps: Number of steps to time, after a few to warm up.
        turns: How often each cell is measured, in turns.
        precision: 32-true, bf16-true or bf16-mixed; null for bf16-mixed on a GPU and 32-true on a CPU.
        device: cpu or cuda; null for the GPUs if available.
        limit: Seconds that a cell may take.
        file: The CSV to update.

    Raises:
        UserError: An argument is invalid, there is no second GPU, or one GPU and two have different losses.
    """
    where = pick_device(device)
    on_gpu = where.type == "cuda"
    if on_gpu and torch.cuda.device_count() < 2:
        raise UserError("device: context parallelism needs two GPUs, but PyTorch finds one")
    precision = precision or best_precision("gpu" if on_gpu else "cpu")
    modes, layouts = modes or (["captured", "eager"] if on_gpu else ["eager"]), layouts or ["whole", "packed"]
    lengths, recomputed = lengths or [65536, 131072], [131072] if recomputed is None else recomputed
    check_names("modes", modes, ["captured", "eager"])
    check_names("layouts", layouts, ["whole", "packed"])
    check_options(precision, steps=steps, turns=turns, document=document, rows=rows, limit=limit, length=min(lengths))
    config, target = model or ["gated_deltanet.yaml", "size/400m.yaml"], Path(file)
    done = {tuple(row[key] for key in CELL) for row in write_csv.read(target, CELL)}
    cells = [cell for cell in cells_of(modes, lengths, recomputed, layouts, turns) if cell.key not in done]
    settings = Settings(config, precision, document, rows, steps, where.type, limit, target)
    if cells:
        with TemporaryDirectory() as folder:
            mp.start_processes(work, (cells, settings, f"{folder}/store"), nprocs=2, start_method="spawn")
    worst = 0.0
    for text, difference in compared(write_csv.read(target)):
        sys.stdout.write(f"{text}\n")
        worst = max(worst, difference)
    if worst > (largest := LIMITS.get(precision, LOW_PRECISION)):
        raise UserError(f"losses of one and of two GPUs differ by {worst:.1e}; rounding allows {largest}")


if __name__ == "__main__":
    script.run(context_parallel_speed)
