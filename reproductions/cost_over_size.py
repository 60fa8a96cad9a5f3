"""Training speed over the size of models and steps, eager and captured, for docs/captured_steps.md.

    python reproductions/cost_over_size.py
    python reproductions/cost_over_size.py --models=[gla,h2] --sizes=[20M,60M] --tokens=[8192] --seconds=100

A process for each GPU takes one model after the other; set CUDA_VISIBLE_DEVICES to choose GPUs. Each row is appended to
the CSV when it is measured, and rows that the file has are not measured again, so a run that was stopped continues.
"""

import csv
import gc
import importlib
import math
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from kernels import UserError
from reproductions import peers as others
from zoo import config as configs
from zoo.arguments import check_names
from zoo.config.command_line import arguments_of
from zoo.lm.model import LanguageModel
from zoo.performance.bench_report import complaint
from zoo.performance.device import described, version
from zoo.performance.model import build, check_options, compared, conditioned, learning, lowest_layers, mean_loss, read
from zoo.performance.timing import synchronize
from zoo.performance.training import DOES_NOT_FIT, TimedLearner, timed, utilisation, warmed
from zoo.train.devices import pick_device, use_processor
from zoo.train.module import best_precision


class Size(NamedTuple):
    """A size of all models, whose parameters are about as many as its name says."""

    hidden_size: int
    num_heads: int
    vocab_size: int
    layers: tuple[int, int, int]  # of Gated DeltaNet and H2; of GLA and attention; of Mamba2, which has no MLPs
    micro_batch: int = 131072  # largest number of tokens in a forward pass


# the most important sizes first
SIZES = {
    "60M": Size(512, 4, 16384, (12, 13, 25)),
    "400M": Size(1024, 8, 32000, (24, 26, 50), 32768),
    "20M": Size(384, 3, 8192, (7, 8, 14)),
    "150M": Size(768, 6, 32000, (13, 14, 27), 65536),
    "5M": Size(256, 2, 4096, (4, 4, 7)),
    "1.3B": Size(2048, 16, 32000, (21, 23, 45), 16384),
}
TOKENS = [8192, 32768, 131072]
# the config, and which of `Size.layers` it has
MODELS = {
    "gated_deltanet": ("gated_deltanet.yaml", 0),
    "attention": ("transformer.yaml", 1),
    "gla": ("gla.yaml", 1),
    "mamba2": ("mamba2.yaml", 2),
    "h2": ("gdn_h2.yaml", 0),
}
# models of other libraries with the sizes of one of ours, and the steps at which they are measured
PEERS = {"fla": "gated_deltanet", "llama": "attention"}
POINTS = {"400M": 32768, "60M": 8192}
BUSY = 1.5  # times the host's time, from which a GPU is busy
SECONDS = 1.0  # to time the steps of a cell
KEY = ("model", "size", "tokens", "mode")
COLUMNS = ["device", "torch", "triton", "library", *KEY, "parameters", "precision", "batch_size", "length"]
COLUMNS += ["micro_batches", "steps", "step_ms", "tokens_per_second", "mfu", "peak_gib", "first_step_s", "note"]
Row = dict[str, Any]


class Settings(NamedTuple):
    """Settings that all rows have in common."""

    precision: str
    length: int
    steps: int
    device: torch.device
    end: float | None  # when to stop, as in `time.time`

    @property
    def over(self) -> bool:
        """Return whether the time is used up."""
        return self.end is not None and time.time() > self.end


class Job(NamedTuple):
    """A model of one size, and its rows to measure: tokens of a step, and eager or captured."""

    model: str
    size: str
    cells: tuple[tuple[int, str], ...]


def config_of(model: str, size: str) -> list[str]:
    """The configs and overrides of one of our models."""
    name, layers = MODELS[model]
    it = SIZES[size]
    overrides = {
        "hidden_size": it.hidden_size,
        "num_heads": it.num_heads,
        "vocab_size": it.vocab_size,
        "num_layers": it.layers[layers],
    }
    if model == "h2":
        overrides["stack.third.window_size"] = 2048
    # a low rate, so that nothing overflows while the same random tokens are learnt
    return [name, *(f"model.{key}={value}" for key, value in overrides.items()), "optim.learning_rate=1e-4"]


@cache
def problem(model: str, precision: str, device: torch.device) -> str | None:
    """Return what is wrong in loss or gradients of the lowest layers of a model of 60M; None if they are right."""
    lowest = conditioned(lowest_layers(build(read(config_of(model, "60M")), precision, device)))
    gate = compared(lowest, precision, "auto", learning)
    return None if gate.passed else gate.says


def peer_of(job: Job, to: Settings) -> nn.Module:
    """Another library's model of the same sizes as ours.

    Raises:
        UserError: The library is not installed.
    """
    parsed = read(config_of(PEERS[job.model], job.size))
    if job.model == "fla":
        others.require(to.device)
        ours = build(parsed, to.precision, torch.device("meta"))
        return others.language_model(ours, configs.to_dict(parsed)["model"], to.device).build()
    if version("transformers") is None:
        raise UserError("transformers is not installed")
    transformers: Any = importlib.import_module("transformers")
    sizes = parsed.model
    ours = build(parsed, to.precision, torch.device("meta"))
    inner: Any = ours.mlps[0]
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=inner.down_proj.in_features,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_heads,
        max_position_embeddings=to.length,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device(to.device):
        built: nn.Module = transformers.LlamaForCausalLM(config)
    return built


def rows_of(job: Job, to: Settings) -> Iterator[Row]:
    """Measure a model in all of its cells, and yield each row when it is measured."""
    package = {"fla": "flash-linear-attention", "llama": "transformers"}.get(job.model)
    about: Row = {key: value for key, value in described(to.device).items() if key in ("device", "torch", "triton")}
    about |= {"model": job.model, "size": job.size, "precision": to.precision, "length": to.length}
    about["library"] = f"{package} {version(package)}" if package and version(package) else package
    meter: Meter | None = None
    try:
        if package is None and (wrong := problem(job.model, to.precision, to.device)):
            raise UserError(wrong)
        model = peer_of(job, to) if package else build(read(config_of(job.model, job.size)), to.precision, to.device)
        meter = Meter(model, job, to)
    except UserError as error:
        about["note"] = str(error)
    except torch.OutOfMemoryError:
        about["note"] = DOES_NOT_FIT
    for tokens, mode in job.cells:
        if to.over:
            return
        row = about | {"tokens": tokens, "mode": mode}
        yield row if meter is None else row | meter.row(tokens, mode)


class Meter:
    """Measures the steps of one model.

    Captured steps whose micro-batches have the size of the previous ones reuse their graphs. Eager steps are left out
    where they only wait for the GPU: where a captured micro-batch takes `BUSY` times as long as the host needs for an
    eager one. The host's time is at most that of the fastest eager micro-batch so far.

    Args:
        model: The model.
        job: Its name and size.
        to: Settings of all rows.
    """

    def __init__(self, model: nn.Module, job: Job, to: Settings) -> None:
        self.model, self.to, self.micro_batch = model, to, SIZES[job.size].micro_batch
        self._config = read(config_of(PEERS.get(job.model, job.model), job.size))
        self._learner: TimedLearner | None = None  # with the graphs of micro-batches of `_batch_size` sequences
        self._batch_size = 0
        self._host_ms = math.inf  # upper bound of the host's time for a micro-batch in eager steps
        self._captured_ms: dict[int, float] = {}  # of a micro-batch, by the tokens of a step

    def row(self, tokens: int, mode: str) -> Row:
        """The numbers of a cell: of a step in micro-batches that fit; a note in place of times if there are none."""
        if mode == "eager" and (ratio := self._captured_ms.get(tokens, 0.0) / self._host_ms) > BUSY:
            reason = f"a captured micro-batch takes {ratio:.1f} times as long as the host needs for an eager one"
            return {"note": f"not measured; the GPU is busy: {reason}"}
        row, fewest = Row(), max(tokens // self.micro_batch, 1)
        for micro_batches in (fewest, 2 * fewest, 4 * fewest):
            row = self._steps(tokens, micro_batches, captured=mode == "captured")
            if row.get("note") != DOES_NOT_FIT or tokens // micro_batches < 2 * self.to.length:
                break
            self._free()
        milliseconds = row.get("step_ms", math.inf) / row["micro_batches"]
        if mode == "captured" and milliseconds < math.inf:
            self._captured_ms[tokens] = milliseconds
        elif mode == "eager":
            self._host_ms = min(self._host_ms, milliseconds)
        return row

    def _steps(self, tokens: int, micro_batches: int, *, captured: bool) -> Row:
        """Measure steps of so many micro-batches."""
        batch_size = tokens // micro_batches // self.to.length
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        row: Row = {"parameters": parameters, "batch_size": batch_size, "micro_batches": micro_batches}
        try:
            learner = self._learner_of(row, batch_size, micro_batches, captured=captured)
            if learner is None:
                return row
            self._time(row, learner)
        except torch.OutOfMemoryError:
            return row | {"note": DOES_NOT_FIT}
        refused = None if learner.captured is None else learner.captured.refused
        if refused is not None:
            return row | {"note": DOES_NOT_FIT if "out of memory" in refused else f"not captured: {refused}"}
        row |= learner.measured(tokens)
        if isinstance(self.model, LanguageModel):
            flops = self.model.flops(self.to.length) / self.to.length
            row["mfu"] = utilisation(flops, row["tokens_per_second"], self.to.precision, self.to.device)
        return row

    def _learner_of(self, row: Row, batch_size: int, micro_batches: int, *, captured: bool) -> TimedLearner | None:
        """A learner after its first steps; None if they do not fit into memory."""
        with tqdm(disable=True) as bar:
            if captured and self._learner is not None and batch_size == self._batch_size:
                learner, learner.micro_batches = self._learner, micro_batches
                learner.step()
                learner.clock.between()
                return learner
            self._free()
            samples = torch.randint(
                self._config.model.vocab_size, (batch_size, self.to.length + 1), device=self.to.device
            )
            optim, loss = configs.instantiate("optim", self._config), _loss(self.model, samples)
            learner = TimedLearner(
                self.model, optim, self.to.precision, "auto", loss, cuda_graph=captured, micro_batches=micro_batches
            )
            if not warmed(row, learner, bar, steps=1):
                return None
        if captured:
            self._learner, self._batch_size = learner, batch_size
        return learner

    def _time(self, row: Row, learner: TimedLearner) -> None:
        """Time steps for about `SECONDS`, at least two of them."""
        with tqdm(disable=True) as bar:
            start = time.perf_counter()
            # most models are too small to reach a GPU's limit of power, and there are many cells
            timed([(row, learner)], 1, bar, heat=0)
            synchronize(self.to.device)
            steps = min(self.to.steps, max(2, int(SECONDS / (time.perf_counter() - start))))
            timed([(row, learner)], steps - 1, bar, heat=0)
        row["steps"] = steps

    def _free(self) -> None:
        """Free the optimiser and the graphs of the last learner."""
        self._learner = None
        self.model.zero_grad(set_to_none=True)
        gc.collect()  # optimisers and graphs refer to each other
        if self.to.device.type == "cuda":
            torch.cuda.empty_cache()


def _loss(model: nn.Module, samples: Tensor) -> Callable[[], Tensor]:
    if isinstance(model, LanguageModel):
        return lambda: mean_loss(model, samples)
    inputs = samples[:, :-1]
    return lambda: model(input_ids=inputs, labels=inputs).loss


def jobs_of(names: Sequence[str], sizes: Sequence[str], tokens: Sequence[int], modes: Sequence[str]) -> Iterator[Job]:
    """All jobs in their order: FLA's, whose kernels are tuned for minutes, then ours, the important sizes first."""
    cells = tuple((number, mode) for number in sorted(tokens) for mode in modes)
    for name in (name for name in ("fla", "llama") if name in names):
        for size, number in POINTS.items():
            if size in sizes:
                yield Job(name, size, ((number, "eager"),))
    for size in (size for size in SIZES if size in sizes):
        yield from (Job(name, size, cells) for name in MODELS if name in names)


def cost_over_size(
    models: list[str] | None = None,
    sizes: list[str] | None = None,
    tokens: list[int] | None = None,
    length: int = 2048,
    steps: int = 8,
    precision: str | None = None,
    device: str | None = None,
    seconds: float | None = None,
    file: str = "runs/cost_over_size.csv",
) -> None:
    """Time training steps of models of several sizes, with several numbers of tokens, eager and captured.

    Args:
        models: Of gated_deltanet, attention, gla, mamba2, h2, fla (flash-linear-attention's Gated DeltaNet) and llama
            (that of transformers); null for all. The last two are measured at two points.
        sizes: Of 5M, 20M, 60M, 150M, 400M, 1.3B; null for all.
        tokens: Tokens of a step, multiples of the length; null for 8192, 32768 and 131072.
        length: Tokens in a sequence.
        steps: Largest number of steps to time, after two; slow steps are timed for about a second, at least twice.
        precision: 32-true, bf16-true or bf16-mixed; null for bf16-mixed on a GPU and 32-true on a CPU.
        device: cpu or cuda; null for all visible GPUs if there are any. On a CPU nothing is captured.
        seconds: When to stop, in seconds from the start; null for no limit.
        file: The CSV to which rows are appended.

    Raises:
        UserError: An argument is invalid.
    """
    where = pick_device(device)
    on_gpu = where.type == "cuda"
    precision = precision or best_precision("gpu" if on_gpu else "cpu")
    names, sizes = models or [*MODELS, *PEERS], sizes or [*SIZES]
    tokens = TOKENS if tokens is None else tokens
    check_names("models", names, [*MODELS, *PEERS])
    check_names("sizes", sizes, SIZES)
    check_options(precision, length=length, steps=steps)
    if wrong := [number for number in tokens if number < 1 or number % length]:
        raise UserError(f"tokens: {wrong[0]} is not a multiple of length={length}")
    if not on_gpu:
        use_processor()
    end = None if seconds is None else time.time() + seconds
    settings = Settings(precision, length, steps, where, end)
    done, target = _done(Path(file)), Path(file)
    jobs = [
        job._replace(cells=left)
        for job in jobs_of(names, sizes, tokens, ["captured", "eager"] if on_gpu else ["eager"])
        if (left := tuple(cell for cell in job.cells if (job.model, job.size, str(cell[0]), cell[1]) not in done))
    ]
    gpus = [torch.device("cuda", number) for number in range(torch.cuda.device_count() if on_gpu else 0)]
    rows = spread(jobs, settings, gpus) if on_gpu else (row for job in jobs for row in rows_of(job, settings))
    for row in rows:
        append(row, target)
        speed = f"{row['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in row else row.get("note")
        sys.stdout.write(f"{' '.join(str(row[key]) for key in KEY)} {speed}\n")
        sys.stdout.flush()
    sys.stdout.write(f"rows: {target}\n")


def spread(jobs: Sequence[Job], to: Settings, devices: Sequence[torch.device]) -> Iterator[Row]:
    """Measure jobs with a process for each device, and yield each row when it is measured."""
    context = get_context("spawn")
    waiting, rows = context.Queue(), context.Queue()
    for job in [*jobs, *([None] * len(devices))]:
        waiting.put(job)

    def started(device: torch.device) -> Any:
        process = context.Process(target=_serve, args=(to._replace(device=device), waiting, rows), daemon=True)
        process.start()
        return process

    processes, restarts = [*map(started, devices)], len(jobs)
    try:
        while not to.over:
            alive = any(process.is_alive() for process in processes)  # before the last look for rows
            try:
                yield rows.get(timeout=1)
                continue
            except queue.Empty:
                pass
            for number, process in enumerate(processes):
                if process.exitcode and restarts:  # an error may leave a GPU unusable for a process
                    restarts, processes[number], alive = restarts - 1, started(devices[number]), True
            if not alive:
                return
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(to: Settings, waiting: Any, rows: Any) -> None:
    """Measure jobs on one GPU until there are none; what cannot be measured is a row that says so."""
    if to.device.type == "cuda":
        torch.cuda.set_device(to.device)
    while (job := waiting.get()) is not None:
        left = [*job.cells]
        try:
            for row in rows_of(job, to):
                rows.put(row)
                left.pop(0)
        except Exception as error:  # of any type, also of other libraries
            head = {"model": job.model, "size": job.size, "note": complaint(error)}
            for tokens, mode in left:
                rows.put(head | {"tokens": tokens, "mode": mode})
            rows.close()
            rows.join_thread()
            raise


def _done(file: Path) -> set[tuple[str, ...]]:
    """The keys of the rows of a file."""
    if not file.exists():
        return set()
    with file.open(encoding="utf-8", newline="") as stream:
        return {tuple(row[key] for key in KEY) for row in csv.DictReader(stream)}


def append(row: Row, file: Path) -> None:
    """Append a row, after a header if the file is new."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n", extrasaction="ignore")
        if not stream.tell():
            writer.writeheader()
        writer.writerow(row)


def main(arguments: list[str]) -> None:
    """Run the command line."""
    _, options = arguments_of(cost_over_size, arguments, "cost_over_size")
    cost_over_size(**options)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
