"""`fit --dry_run`: what a run will need, from its config alone."""

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from jsonargparse import Namespace

from kernels import UserError
from mixers import did_you_mean
from zoo import config as configs
from zoo.arguments import errors_about
from zoo.data.contract import vocabulary_of
from zoo.data.text.tokenised_text import TokenisedText
from zoo.display import new_console, new_table
from zoo.lm.model import LanguageModel
from zoo.runs.cautions import cautions
from zoo.runs.estimate import moments, num_trained, step_seconds, training_flops, training_pass
from zoo.runs.rows import check_rows, device_count, divide_step, tokens_per_step
from zoo.saved.model import SavedModel
from zoo.saved.public.import_export import layouts
from zoo.train.callbacks.activation_checkpointing import CheckpointedBlocks
from zoo.train.devices import PEAKS
from zoo.train.distillation import Distillation
from zoo.train.optim import build_optimizer, build_schedule, freeze_others

SHARED = 0.93  # speed of a GPU that exchanges gradients with others; 0.91 to 0.96 in scaling_h200.csv
WORKSPACES = 0.05  # of the memory of all else: rounding of the allocator, buffers of libraries
GIB = 2**30
LOCAL = 8  # GPUs of a machine
PRECISIONS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}  # Lightning's short names


class Forecast(NamedTuple):
    """Estimate of what a run needs.

    A step of `tokens_per_step` has `micro_batches` of `rows` on each of the `devices`; `strategy` is a name or a class.
    `state_size` is that of a sequence. Without a number of steps, `tokens` is None, and `flops` and `shards` are 0.
    `memory` has the GiB of each part on a GPU, and is empty where Triton is not installed. `card` and `hours` are None
    unless GPUs are named. `checkpoints` and `shards` are GiB on disk, `layouts` those that `convert` can write, and
    `cautions` sentences about settings that do not suit the size.
    """

    parameters: int
    layers: int
    state_size: int | float
    tokens_per_step: int
    rows: int
    micro_batches: int
    strategy: str
    learning_rate: float
    tokens: int | None
    flops: float
    memory: Mapping[str, float]
    devices: int
    card: str | None
    hours: float | None
    checkpoints: float
    shards: float
    layouts: list[str]
    cautions: list[str]


def forecast(config: Namespace, on: str | None = None) -> tuple[Forecast, LanguageModel]:
    """Estimate what the run of a resolved config needs, and return its model on the meta device as well.

    `on` are GPUs, such as 8xH100; None for the devices of the config, without a time. A UserError if it names no known
    GPU or contradicts `trainer.devices`, or the data has no rows of a fixed length.
    """
    config = config.clone()
    config.trainer.precision = PRECISIONS.get(str(config.trainer.precision), config.trainer.precision)
    devices, card = (device_count(config.trainer), None) if on is None else _gpus(on, config.trainer)
    check_rows(config, devices)
    divide_step(config, devices)
    per_step, name = tokens_per_step(config), config.data.class_path.rpartition(".")[2]
    if per_step is None or (config.model.inputs, config.model.head) != (None, None):
        raise UserError(f"dry_run: counts the tokens of a language model; {name} has none, or rows of no fixed length")
    data, steps = config.data.init_args, config.trainer.max_steps
    vocabulary, absent = _tokens(built := configs.instantiate("data", config))
    config.model.vocab_size = configs.vocabulary(config, built, vocabulary)
    model, tokens = configs.from_config(config, "meta"), steps * per_step if steps > 0 else None
    optim = configs.instantiate("optim", config)
    distillation = None
    if (path := config.teacher.checkpoint) is not None:
        with errors_about("teacher.checkpoint"):
            teacher, _ = SavedModel.open(path).on_meta()
        distillation = Distillation(configs.instantiate("teacher", config), teacher, model)
    train_only = optim.train_only or (None if distillation is None else distillation.train_only)
    if train_only is not None:
        freeze_others(model, train_only)
    optimizer = build_optimizer(model, replace(optim, fused=None), sharded=_stage(config.trainer) > 0)
    if steps > 0:
        build_schedule(optimizer, optim, steps)  # for the errors that `fit` would raise
    kept = moments(optimizer)
    on_gpu = None if find_spec("triton") is None else _on_gpu(config, model, devices, card, distillation, kept)
    memory, seconds = on_gpu or ({}, None)
    permanent = steps // (config.checkpoints.keep_every_n_steps or steps + 1) if steps > 0 else 0
    saved = _bytes(config.trainer) * (model.num_parameters() + kept) / GIB
    return Forecast(
        parameters=model.num_parameters(),
        layers=model.num_layers,
        state_size=model.state_size(data.sequence_length),
        tokens_per_step=per_step,
        rows=data.batch_size * config.context_parallel // devices,
        micro_batches=config.trainer.accumulate_grad_batches or 1,
        strategy=_strategy(config.trainer).replace("auto", "ddp" if devices > 1 else "one process"),
        learning_rate=config.optim.learning_rate,
        tokens=tokens,
        flops=training_flops(model, data.sequence_length, distillation) / data.sequence_length * (tokens or 0),
        memory=memory,
        devices=devices,
        card=card,
        hours=None if seconds is None or tokens is None else steps * seconds / 3600,
        checkpoints=(2 + min(permanent, config.checkpoints.keep_last or permanent)) * saved,
        shards=(tokens or 0) * (2 if (vocabulary or 0) <= 1 << 16 else 4) / GIB,
        layouts=layouts(model),
        cautions=[*absent, *cautions(config, model.num_parameters(), vocabulary, devices)],
    ), model


def _on_gpu(
    config: Namespace,
    model: LanguageModel,
    devices: int,
    card: str | None,
    distillation: Distillation | None,
    kept: int,
) -> tuple[dict[str, float], float | None]:
    """GiB of memory by part on each GPU, whose optimiser keeps some numbers, and the seconds of a step on a card."""
    trainer, data, every = config.trainer, config.data.init_args, config.activation_checkpointing
    model, shared = deepcopy(model), config.context_parallel
    teachers = [] if distillation is None else [distillation.teacher]
    for each in [] if trainer.precision == "32-true" else [model, *teachers]:
        each.bfloat16()
    for block, forward in [] if every is None else CheckpointedBlocks(every).replaced(model):
        block.forward = forward
    rows = max(data.batch_size * shared // devices, 1)
    passed = training_pass(model, rows, data.sequence_length // shared, card or "H100", distillation)
    numbers = model.num_parameters(), num_trained(model), kept, sum(each.num_parameters() for each in teachers)
    size, trained, state, teacher = (_bytes(trainer) * number / GIB for number in numbers)
    stage, strategy = _stage(trainer), trainer.strategy
    offloaded = "offload" in strategy if isinstance(strategy, str) else strategy.init_args.get("offload_optimizer")
    buckets = devices > 1 and stage == 0 and isinstance(strategy, str)  # Lightning's DDP copies gradients into buckets
    memory = {
        "weights": size / (devices if stage == 3 else 1),
        "bf16 copies": 0.0 if str(trainer.precision).endswith("-true") else size / 2,
        "teacher": teacher,
        "gradients": trained / (devices if stage >= 2 else 1) + (trained if buckets else 0),
        "optimiser": 0.0 if stage and offloaded else state / (devices if stage else 1),
        "activations": passed.saved / GIB,
        "logits": (passed.peak - passed.saved) / GIB,
    }
    memory["workspaces"] = WORKSPACES * sum(memory.values())
    if card is None:
        return memory, None
    parts, recomputed = trainer.accumulate_grad_batches or 1, 0 if every is None else 1 / every
    shards = devices if stage else 1
    seconds = step_seconds(
        model, passed, card, distillation=distillation, micro_batches=parts, recomputed=recomputed, shards=shards
    )
    return memory, seconds / (1 if devices == 1 else SHARED)


def show(result: Forecast) -> None:
    """Print a forecast and its warnings."""
    total, size = sum(result.memory.values()), None if result.card is None else PEAKS[result.card][2]
    of = "" if size is None else f" of {size} GiB"
    of += ", which does not fit" if size is not None and total > size else ""
    parts = ", ".join(f"{name} {_gib(part)}" for name, part in result.memory.items() if part)
    speed = (result.tokens or 0) / max(3600 * (result.hours or 0), 1e-9)
    duration = "less than a minute" if (result.hours or 0) < 1 / 60 else f"{_gib(result.hours or 0)} hours"
    batches = "1 micro-batch" if result.micro_batches == 1 else f"{result.micro_batches} micro-batches"
    where = f" on each of {result.devices} GPUs" if result.devices > 1 else ""
    on = f"{result.devices} × {result.card}, {speed:,.0f} tokens/s without validation"
    steps = (result.tokens or 0) / max(result.tokens_per_step * result.micro_batches, 1)
    short = 3600 * (result.hours or 0) < steps / 200  # 5 ms
    on += "; launches, which are most of so short a step, are not counted" if short else ""
    on += "; the network between machines is not counted" if result.devices > LOCAL else ""
    table = new_table(("", ""), left=2, wrapped=("",), show_header=False, box=None)
    table.add_row("parameters", f"{result.parameters:,} in {result.layers} layers")
    table.add_row("state", f"{result.state_size:,} numbers a sequence")
    table.add_row(
        "step",
        f"{result.tokens_per_step:,} tokens: {batches} of {result.rows} rows{where} ({result.strategy}); "
        f"learning rate {result.learning_rate:g}",
    )
    if result.tokens is not None:
        table.add_row("tokens", f"{result.tokens:,}, {result.tokens / result.parameters:.2g} a parameter")
        table.add_row("training FLOPs", f"{result.flops:.2g}")
    table.add_row("memory of a GPU", f"{_gib(total)} GiB{of}: {parts}" if parts else "not known without Triton")
    table.add_row("time", "not known; name the GPUs: --on=8xH100" if result.hours is None else f"{duration} on {on}")
    disk = f"{_gib(result.checkpoints)} GiB of checkpoints, {_gib(result.shards)} GiB of tokens, if each is read once"
    table.add_row("disk", disk)
    table.add_row("layouts", ", ".join(result.layouts))
    console = new_console()
    console.print(table, highlight=False)
    less = "use train/checkpointing.yaml, train/fsdp.yaml on several GPUs, or fewer rows_per_device"
    too_large = [f"the run does not fit into {size} GiB; {less}"] if size and total > size else []
    for sentence in (*result.cautions, *too_large):
        console.print(f"warning: {sentence}", style="yellow", highlight=False, soft_wrap=True)


def _gib(number: float) -> str:
    """A number with one decimal, or with two digits if it is small."""
    return f"{number:,.1f}" if number >= 1 else f"{number:.2g}"


def _gpus(on: str, trainer: Namespace) -> tuple[int, str]:
    """The number and the name of the GPUs in a text such as 8xH100."""
    cards = {card.replace(" ", "-").lower(): card for card in PEAKS}
    number, name = re.fullmatch(r"(?:([1-9][0-9]*)x)?(.*)", on, re.DOTALL).groups()  # type: ignore[union-attr]
    if (card := cards.get(name.lower())) is None:
        shown, names = [card.replace(" ", "-") for card in PEAKS], "|".join(map(re.escape, cards))
        hint = did_you_mean(name, shown)
        if typo := re.fullmatch(rf"(\d+)[\Wx]?({names})|({names})[\Wx]?(\d+)", on.lower()):
            hint = f"; did you mean {typo[1] or typo[4]}x{cards[typo[2] or typo[3]].replace(' ', '-')}?"
        raise UserError(f"on: {on!r} must be a number and a GPU, such as 8xH100{hint}; known are {', '.join(shown)}")
    count = int(number or 1)
    if str(trainer.devices) not in ("auto", "-1") and (configured := device_count(trainer)) != count:
        raise UserError(f"on: {on} has {count} GPUs, but trainer.devices and num_nodes make {configured}")
    return count, card


def _tokens(data: Any) -> tuple[int | None, list[str]]:
    """The vocabulary size of data, whose tokenizer is not trained, and a sentence about a file that is not here yet."""
    if not isinstance(data, TokenisedText):
        return vocabulary_of(data), []
    size = data.vocab_size
    try:
        size = size if data.tokenizer is None else data.get_tokenizer().vocab_size
        data.check_files()
    except UserError as error:
        return size, [str(error)]
    return size, []


def _stage(trainer: Namespace) -> int:
    """The stage of ZeRO that a strategy corresponds to; 0 if each GPU holds everything."""
    strategy = trainer.strategy
    name = _strategy(trainer)
    if isinstance(strategy, str):  # those of Lightning, such as deepspeed_stage_2_offload and fsdp
        return int(match[1]) if (match := re.search(r"stage_([123])", name)) else 3 * name.startswith("fsdp")
    return {"Zero": strategy.init_args.stage if name == "Zero" else 0, "FSDP2": 3}.get(name, 0)


def _strategy(trainer: Namespace) -> str:
    """The name of a strategy, or that of its class."""
    strategy = trainer.strategy
    return str(strategy.class_path if isinstance(strategy, Namespace) else strategy).rpartition(".")[2]


def _bytes(trainer: Namespace) -> int:
    """Bytes of a number in the weights, and in their gradients and moments."""
    return 2 if trainer.precision in ("bf16-true", "16-true") else 4
