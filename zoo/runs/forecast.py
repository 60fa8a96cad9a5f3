"""`fit --dry_run`: what a run will need, from its config alone.

A training step passes over the meta device: kernels are only listed and tensors have no data. The bytes that are
allocated at a time are the memory of activations; the bytes that are allocated in all measure the memory traffic.
"""

import weakref
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import Namespace
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import UserError
from mixers import did_you_mean
from zoo import config as configs
from zoo.data.text.tokenizer import Tokenizer
from zoo.display import new_console, new_table
from zoo.lm.model import LanguageModel
from zoo.runs.cautions import cautions
from zoo.runs.rows import device_count, divide_step, tokens_per_step
from zoo.saved.public.import_export import layouts
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.callbacks.throughput import TRAINING_FLOPS
from zoo.train.devices import PEAKS
from zoo.train.metrics import total_loss

# Fitted to 90 steps of 20M to 1.3B parameters in reproductions/measured (mixers_400m.csv, cost_over_size_h100.csv):
# matrix products run at this share of the peak, and a byte that is allocated takes the time of so many transfers.
PRODUCTS, TRAFFIC = 0.75, 3.4
OPTIMISER_TRAFFIC = 28  # bytes a parameter: AdamW reads four numbers in fp32, and writes three
SHARED = 0.93  # speed of a GPU that exchanges gradients with others; 0.91 to 0.96 in scaling_h200.csv
WORKSPACES = 0.05  # of the memory of all else: rounding of the allocator, buffers of libraries
GIB = 2**30
DEFAULT_CARD = "H100"  # which kernels run


class Forecast(NamedTuple):
    """Estimate of what a run needs.

    Attributes:
        parameters, layers: Of the model.
        state_size: Numbers in the recurrent state of a sequence, after `data.sequence_length` tokens.
        tokens, flops: Of the whole training; None without a number of steps.
        memory: Part → GiB on each GPU; empty where Triton is not installed.
        devices, card: The GPUs; without a name unless `on` has it.
        hours: Training time without validation; None unless GPUs are named.
        checkpoints, shards: GiB on disk: checkpoints that are kept, and tokens if each is seen once.
        layouts: Names of the layouts that `convert` can write the model to.
        cautions: Sentences about settings that do not suit the size of the run.
    """

    parameters: int
    layers: int
    state_size: int | float
    tokens: int | None
    flops: float | None
    memory: Mapping[str, float]
    devices: int
    card: str | None
    hours: float | None
    checkpoints: float
    shards: float | None
    layouts: list[str]
    cautions: list[str]

    def table(self) -> Table:
        """The numbers, a row each."""
        table = new_table(("", ""), left=2, wrapped=("",), show_header=False, box=None)
        rows = {
            "parameters": f"{self.parameters:,} in {self.layers} layers",
            "state": f"{self.state_size:,} numbers a sequence",
        }
        if self.tokens is not None:
            rows["tokens"] = f"{self.tokens:,}, {self.tokens / self.parameters:.2g} a parameter"
            rows["training FLOPs"] = f"{self.flops:.2g}"
        total, size = sum(self.memory.values()), None if self.card is None else PEAKS[self.card][2]
        of = "" if size is None else f" of {size}" + (", which does not fit," if total > size else "")
        parts = ", ".join(f"{name} {size:.1f}" for name, size in self.memory.items())
        rows["memory of a GPU"] = f"{total:.1f}{of} GiB: {parts}" if parts else "not known without Triton"
        gpus = f"{self.devices} × {self.card}, without validation"
        rows["time"] = "name the GPUs: --on=8xH100" if self.hours is None else f"{self.hours:,.1f} hours on {gpus}"
        rows["disk"] = f"{self.checkpoints:.1f} GiB of checkpoints" + (
            "" if self.shards is None else f", {self.shards:.1f} GiB of token shards for text that is seen once"
        )
        for name, text in (rows | {"layouts": ", ".join(self.layouts)}).items():
            table.add_row(name, text)
        return table


class Pass(NamedTuple):
    """Bytes of a training step on the meta device: for the backward pass, at most, and allocated in all."""

    saved: int
    peak: int
    allocated: int


class _Allocations(TorchDispatchMode):
    """Counts the bytes of new tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.live = self.peak = self.allocated = 0
        self._seen = weakref.WeakSet(x.untyped_storage() for x in model.parameters())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (storage := x.untyped_storage()) not in self._seen:
                self._seen.add(storage)
                self.live, self.allocated = self.live + storage.nbytes(), self.allocated + storage.nbytes()
                weakref.finalize(storage, self._freed, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _freed(self, size: int) -> None:
        self.live -= size


def training_pass(model: LanguageModel, rows: int, length: int, card: str = DEFAULT_CARD) -> Pass:
    """Run a training step of a model on the meta device, with the kernels of a GPU. It needs Triton."""
    from kernels.core.backend import meta_as_gpu
    from kernels.gpu.device import GPUS, assumed
    from kernels.gpu.paths import dry_run
    from kernels.gpu.plan import of_rows

    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    gpu = next((gpu for name, gpu in GPUS.items() if name.removeprefix("RTX ") in card), GPUS["A100"])
    of_rows.cache_clear()  # plans depend on the assumed GPU
    try:
        with assumed(gpu), meta_as_gpu(), dry_run(), _Allocations(model) as counted:
            loss = total_loss(model, tokens, tokens)
            saved = counted.live
            loss.backward()
    finally:
        of_rows.cache_clear()
    return Pass(saved, counted.peak, counted.allocated)


def step_seconds(
    model: LanguageModel,
    passed: Pass,
    rows: int,
    length: int,
    card: str,
    *,
    micro_batches: int = 1,
    recomputed: float = 0.0,
    shards: int = 1,
) -> float:
    """Return the estimated seconds of an optimiser step on a GPU, without exchange between GPUs.

    Args:
        model: The model.
        passed: The `training_pass` of a micro-batch.
        rows, length: Of a micro-batch.
        card: A name in `PEAKS`.
        micro_batches: Of a step.
        recomputed: Share of the blocks that the backward pass recomputes.
        shards: GPUs that divide the optimiser's work.
    """
    peak, bandwidth, _ = PEAKS[card]
    masked = sum(mixer.masked_flops(length) for mixer in model.mixers)
    flops = (TRAINING_FLOPS + recomputed) * rows * (model.flops(length) - masked)
    optimiser = OPTIMISER_TRAFFIC * model.num_parameters() / shards / bandwidth
    return micro_batches * (flops / (PRODUCTS * peak) + TRAFFIC * passed.allocated / bandwidth) + optimiser


def forecast(config: Namespace, on: str | None = None) -> tuple[Forecast, LanguageModel]:
    """Estimate what the run of a resolved config needs, and return its model on the meta device as well.

    Args:
        config: The config, which is not changed.
        on: GPUs, such as 8xH100; None for the devices of the config, without a time.

    Raises:
        UserError: `on` names no known GPU or contradicts `trainer.devices`, or the data has no rows of a length.
    """
    config = config.clone()
    devices, card = (device_count(config.trainer), None) if on is None else _gpus(on, config.trainer)
    divide_step(config, devices)
    data, trainer = config.data.init_args, config.trainer
    if (
        (per_step := tokens_per_step(config)) is None
        or config.model.inputs is not None
        or config.model.head is not None
    ):
        name = config.data.class_path.rpartition(".")[2]
        raise UserError(f"dry_run: counts the tokens of a language model; {name} has none, or rows of no fixed length")
    vocabulary = _vocabulary(data)
    config.model.vocab_size = config.model.vocab_size or vocabulary
    model, length = configs.from_config(config, "meta"), data.sequence_length
    steps, precision = max(trainer.max_steps, 0) or None, str(trainer.precision or "bf16-mixed")
    tokens, flops = (None, None) if steps is None else (steps * per_step, model.flops(length) / length)
    number = 2 if precision in ("bf16-true", "16-true") else 4  # bytes
    size = number * model.num_parameters() / GIB
    kept = 2 + (0 if steps is None else steps // (config.checkpoints.keep_every_n_steps or steps + 1))
    result = Forecast(
        parameters=model.num_parameters(),
        layers=model.num_layers,
        state_size=model.state_size(length),
        tokens=tokens,
        flops=None if flops is None or tokens is None else TRAINING_FLOPS * flops * tokens,
        memory={},
        devices=devices,
        card=card,
        hours=None,
        checkpoints=3 * size * min(kept, 2 + (config.checkpoints.keep_last or kept)),  # weights and two moments
        shards=None if tokens is None else tokens * (2 if (vocabulary or 0) <= 1 << 16 else 4) / GIB,
        layouts=layouts(model),
        cautions=cautions(config, model.num_parameters(), vocabulary, devices),
    )
    if find_spec("triton") is None:
        return result, model
    stepped, every = model if precision == "32-true" else model.bfloat16(), config.activation_checkpointing
    for block, forward in [] if every is None else CheckpointedBlocks(every).replaced(stepped):
        block.forward = forward
    rows, part = max(data.batch_size * config.context_parallel // devices, 1), length // config.context_parallel
    passed = training_pass(stepped, rows, part, card or DEFAULT_CARD)
    memory = _memory(trainer, size, passed, devices, mixed=precision.endswith("-mixed"))
    if card is None or steps is None:
        return result._replace(memory=memory), model
    seconds = step_seconds(
        stepped,
        passed,
        rows,
        part,
        card,
        micro_batches=trainer.accumulate_grad_batches or 1,
        recomputed=0.0 if every is None else 1 / every,
        shards=devices if _stage(trainer) else 1,
    )
    return result._replace(memory=memory, hours=steps * seconds / (1 if devices == 1 else SHARED) / 3600), model


def show(result: Forecast) -> None:
    """Print a forecast and its warnings."""
    console = new_console()
    console.print(result.table(), highlight=False)
    for sentence in result.cautions:
        console.print(f"warning: {sentence}", style="yellow", highlight=False, soft_wrap=True)


def _gpus(on: str, trainer: Namespace) -> tuple[int, str]:
    """The number and the name of the GPUs in a text such as 8xH100."""
    count, times, name = on.rpartition("x")
    cards = {card.replace(" ", "-").lower(): card for card in PEAKS}
    if times and not count.isdecimal():
        count, name = "1", on
    if (card := cards.get(name.lower())) is None or int(count or 1) < 1:
        shown = [card.replace(" ", "-") for card in PEAKS]
        hint = did_you_mean(name, shown)
        raise UserError(f"on: {on!r} must be a number and a GPU, such as 8xH100{hint}; known are {', '.join(shown)}")
    number = int(count or 1)
    if str(trainer.devices) not in ("auto", "-1") and (configured := device_count(trainer)) != number:
        raise UserError(f"on: {on} has {number} GPUs, but trainer.devices and num_nodes make {configured}")
    return number, card


def _vocabulary(data: Namespace) -> int | None:
    """The entries of a tokenizer: those of its file if that is here, or else of `data.vocab_size`."""
    path = data.get("tokenizer")
    return data.get("vocab_size") if path is None or not Path(path).exists() else Tokenizer.from_file(path).vocab_size


def _stage(trainer: Namespace) -> int:
    """The stage of ZeRO that a strategy corresponds to; 0 if each GPU holds everything."""
    strategy = trainer.strategy
    name = str(strategy.class_path if isinstance(strategy, Namespace) else strategy).rpartition(".")[2]
    return {"Zero": strategy.init_args.stage if name == "Zero" else 0, "FSDP2": 3}.get(name, 0)


def _memory(trainer: Namespace, size: float, passed: Pass, devices: int, *, mixed: bool) -> dict[str, float]:
    """GiB on each GPU by part, for parameters of `size` GiB."""
    stage, strategy = _stage(trainer), trainer.strategy
    offloaded = bool(stage and getattr(strategy.init_args, "offload_optimizer", None))
    buckets = devices > 1 and isinstance(strategy, str)  # Lightning's DDP copies gradients into buckets
    memory = {
        "weights": size / (devices if stage == 3 else 1),
        "bf16 copies": size / 2 if mixed else 0.0,
        "gradients": size / (devices if stage >= 2 else 1) + (size if buckets else 0),
        "optimiser": 0.0 if offloaded else 2 * size / (devices if stage else 1),
        "activations": passed.saved / GIB,
        "logits": (passed.peak - passed.saved) / GIB,
    }
    return {**memory, "workspaces": WORKSPACES * sum(memory.values())}
