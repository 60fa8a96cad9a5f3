"""`bench training`: tokens per second in training, without Lightning, and where the time of a step goes."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import kernels
from kernels import UserError
from zoo import config as configs
from zoo.display import progress_bar
from zoo.lm.model import LanguageModel
from zoo.performance import model as models
from zoo.performance.bench_report import PATH, Report, captioned, formatted, path_of, without
from zoo.performance.device import described, pick_backend
from zoo.performance.model import running
from zoo.performance.timing import Clock, process_age, synchronize
from zoo.train.adamw import AdamW
from zoo.train.callbacks.compiled_ahead import compile_ahead
from zoo.train.callbacks.compiled_blocks import compiled_blocks
from zoo.train.callbacks.throughput import TRAINING_FLOPS
from zoo.train.captured_step import CapturedStep
from zoo.train.devices import peak_flops, pick_device, use_processor
from zoo.train.module import best_precision
from zoo.train.muon import Muon
from zoo.train.optim import Optimisation, build_optimizer, clip, total_norm

DOES_NOT_FIT = "does not fit into memory; fewer tokens in a step may"
WARM_UP = 2  # steps after the first
TURN = 4  # steps of a model in a row
HEAT = 4.0  # seconds of load before timing, after which a GPU at its limit of power has slowed down
MOST_HEATING = 100  # steps of a model in that time; small models reach no such limit


class TimedLearner:
    """A model with its optimiser and a clock, trained on a loss.

    Args:
        model: The model to train.
        optim: The optimiser and its settings; the learning rate stays constant.
        precision: 32-true, bf16-true, 16-true or bf16-mixed.
        backend: Backend of the kernels.
        loss: Computes the mean loss of a micro-batch.
        cuda_graph: Whether to capture the step as CUDA graphs.
        micro_batches: Number of forward and backward passes in a step.

    Attributes:
        captured: The captured step; None if it runs eagerly.
        clock: Has marks at the start of each step, after each forward and each backward pass, and at the end.
        peak_gib: Largest memory in use on a GPU; None until it is measured.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: Optimisation,
        precision: str,
        backend: str,
        loss: Callable[[], Tensor],
        *,
        cuda_graph: bool = False,
        micro_batches: int = 1,
    ) -> None:
        self.model, self.micro_batches = model, micro_batches
        self.device = next(model.parameters()).device
        self.clock = Clock(self.device)
        self.peak_gib: float | None = None

        def computed() -> Tensor:
            with running(precision, self.device, backend):
                return loss()

        self.loss = computed
        self.gradient_clip, self.optimizer = optim.gradient_clip, build_optimizer(model, optim)
        self.captured = CapturedStep(lambda: (computed(),), model.parameters()) if cuda_graph else None
        if self.captured is not None and isinstance(self.optimizer, AdamW | Muon):
            self.optimizer.replay = partial(self.captured.update, self.optimizer)

    def step(self) -> None:
        """Run a training step without synchronising, so that the device stays busy while the host prepares the next."""
        self.clock.mark()
        for micro_batch in range(self.micro_batches):
            first = micro_batch == 0
            if self.captured is not None:
                self.captured.prepare(first=first)
            loss = self.loss() if self.captured is None else self.captured(first=first)[0]
            self.clock.mark()
            (loss if self.micro_batches == 1 else loss / self.micro_batches).backward()
            self.clock.mark()
        self._update()
        self.clock.mark()

    def _update(self) -> None:
        """Clip the gradients, apply them and drop them."""
        if self.gradient_clip is not None and self.captured is not None:
            self.captured.clip(self.gradient_clip, self.captured.gradient_norm())
        elif self.gradient_clip is not None:
            trained = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
            clip(trained, self.gradient_clip, total_norm(x.grad for x in trained if x.grad is not None))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def measured(self, tokens: int) -> dict[str, Any]:
        """Medians over the steps since the clock was last read, of `tokens` tokens each, and the most memory."""
        intervals, parts = self.clock.between(), 2 * self.micro_batches
        steps = [intervals[at : at + parts + 1] for at in range(0, len(intervals), parts + 2)]  # one more between steps
        return {
            "step_ms": (step_ms := statistics.median(map(sum, steps))),
            "forward_ms": statistics.median(sum(step[:parts:2]) for step in steps),
            "backward_ms": statistics.median(sum(step[1:parts:2]) for step in steps),
            "optimiser_ms": statistics.median(step[parts] for step in steps),
            "tokens_per_second": tokens / step_ms * 1e3,
            "peak_gib": self.peak_gib,
        }


# our model, what the report is about, the optimiser, tokens [B,T+1] and the bar → the row of another model, and its
# learner after `warmed`; None if it does not run
Other = Callable[[LanguageModel, dict[str, Any], Optimisation, Tensor, Any], tuple[dict[str, Any], TimedLearner | None]]


class TrainingReport(Report):
    """Times of training steps."""

    benchmark = "training"

    def table(self) -> Table:
        """A row for each model."""
        about = self.about
        milliseconds = ("step_ms", "forward_ms", "backward_ms", "optimiser_ms")
        columns = ["model", "params", "path", "tok/s", "step ms", "fwd", "bwd", "optim", "GiB", "MFU", "first", "ready"]
        table = self.new_table(columns)
        remarks = [
            f"batch {about['batch_size']} × {about['length']} tokens"
            f"{', compiled' if about['compiled'] else ''}{', captured' if about.get('cuda_graph') else ''}",
            "first: seconds of the first step; ready: from the start of the process to its end",
            PATH,
        ]
        for row in self.rows:
            if "step_ms" not in row:
                without(table, remarks, [row["model"]], row)
                continue
            table.add_row(
                row["model"],
                f"{row['parameters'] / 1e6:.1f} M",
                path_of(row, remarks),
                f"{row['tokens_per_second']:,.0f}",
                *(f"{row[key]:.1f}" for key in milliseconds),
                formatted(row["peak_gib"], "{:.1f}"),
                formatted(row["mfu"], "{:.1%}"),
                f"{row['first_step_s']:.1f}",
                formatted(row["ready_s"], "{:.1f}"),
            )
        return captioned(table, remarks)


def bench_training(
    config: Sequence[str],
    batch_size: int | None = None,
    length: int | None = None,
    steps: int = 8,
    precision: str | None = None,
    backend: str | None = None,
    device: str | None = None,
    compile: bool = False,
    cuda_graph: bool = False,
    folder: str = "runs/bench-training",
    others: Sequence[Other] = (),
) -> Report:
    """Time training steps of a model on random tokens, after checking its loss and gradients.

    The check computes the lowest layers of each kind, since the fp32 loops are slow.

    Args:
        config: Configs and `key=value` overrides, in order.
        batch_size: Sequences in a step; null for the config's.
        length: Tokens in a sequence; null for the config's.
        steps: Number of steps to time, after a few others; on a GPU after four seconds of them, or 100.
        precision: 32-true, bf16-true, 16-true or bf16-mixed; null for the config's, or else bf16-mixed on a GPU and
            32-true on a CPU.
        backend: Backend of the kernels: auto, triton, torch or reference; null for ZOO_BACKEND, or auto.
        device: cpu or cuda; null for the GPU if available.
        compile: Whether to compile each block with torch.compile.
        cuda_graph: Whether to capture the step as CUDA graphs, on a GPU.
        folder: The folder of bench.json.
        others: In Python, other models, whose steps are timed in turns with those of the first.

    Raises:
        UserError: An argument is invalid.
    """
    where = pick_device(device)
    if where.type == "cpu":
        use_processor(deterministic=kernels.is_deterministic())
    parsed = models.read(config)
    data = parsed.data.get("init_args") or {}
    batch_size = batch_size if batch_size is not None else parsed.rows_per_device or data.get("batch_size", 8)
    length = length if length is not None else data.get("sequence_length", 1024)
    precision = precision or parsed.trainer.precision or best_precision("gpu" if where.type == "cuda" else "cpu")
    backend = pick_backend(backend)
    models.check_options(precision, batch_size=batch_size, length=length, steps=steps)
    name = models.name(config)
    about = {
        **described(where),
        "deterministic": kernels.is_deterministic(),
        "model": configs.to_dict(parsed)["model"],
        "batch_size": batch_size,
        "length": length,
        "precision": precision,
        "compiled": compile,
        "cuda_graph": cuda_graph,
    }
    check_graph(cuda_graph, where)
    report = TrainingReport(Path(folder), about)
    tokens = torch.randint(parsed.model.vocab_size, (batch_size, length + 1), device=where)
    optim = configs.instantiate("optim", parsed)

    with progress_bar(total=1 + (1 + len(others)) * (1 + WARM_UP + steps), desc="training", unit=" steps") as bar:
        model = models.build(parsed, precision, where)
        row: dict[str, Any] = {"model": name, "parameters": model.num_parameters()}
        report.rows.append(row)
        if compile:  # as `compile: true` does
            for block, compiled in compiled_blocks(model):
                block.forward = compiled
        learner = TimedLearner(
            model, optim, precision, backend, lambda: models.mean_loss(model, tokens), cuda_graph=cuda_graph
        )
        learners = [(row, learner)] if warmed(row, learner, bar) else []
        # after the first step, whose time is to include compilation
        checked = models.conditioned(models.lowest_layers(models.build(parsed, precision, where)))
        gate = models.compared(checked, precision, backend, models.learning)
        bar.update()
        row["gate"] = gate.record()
        if not gate.passed:
            report.rows[:] = [{"model": name, "gate": row["gate"], "note": gate.says}]  # without times
            return report
        for other in others:
            row, peer = other(model, about, optim, tokens, bar)
            report.rows.append(row)
            learners += [(row, peer)] if peer is not None else []
        timed(learners, steps, bar)
    for row, learner in learners:
        row |= learner.measured(batch_size * length)
        if learner.captured is not None:
            row["not_captured"] = learner.captured.refused
        flops = model.flops(length) / length if learner.model is model else None
        row["mfu"] = utilisation(flops, row["tokens_per_second"], precision, where)
    return report


def check_graph(cuda_graph: bool, device: torch.device) -> None:
    """Raise a UserError if steps are to be captured on a device without CUDA graphs."""
    if cuda_graph and device.type != "cuda":
        raise UserError(f"cuda_graph is true, but the device is a {device.type}; CUDA graphs need an NVIDIA GPU")


def utilisation(flops: float | None, tokens_per_second: float, precision: str, device: torch.device) -> float | None:
    """The fraction of the device's peak that training reaches, from forward FLOPs of a token; None if unknown."""
    peak = None if precision == "32-true" else peak_flops(device)
    return None if peak is None or flops is None else TRAINING_FLOPS * flops * tokens_per_second / peak


def warmed(row: dict[str, Any], learner: TimedLearner, bar: Any, before: int = 0, steps: int = WARM_UP) -> bool:
    """Run the first step and `steps` more; False if out of memory.

    It records the time of the first, which implementations of our ops ran, and the memory beyond `before` bytes.
    """
    on_gpu = learner.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(learner.device)
    synchronize(learner.device)
    start = time.perf_counter()
    try:
        with kernels.implementations() as ran:
            if isinstance(learner.model, LanguageModel):
                compile_ahead(learner.model, learner.loss)
            learner.step()
        row["implementations"] = {op: sorted(names) for op, names in sorted(ran.items())}
        synchronize(learner.device)
        row |= {"first_step_s": time.perf_counter() - start, "ready_s": process_age()}
        bar.update()
        for _ in range(steps):
            learner.step()
            bar.update()
        learner.clock.between()
    except torch.OutOfMemoryError:
        row["note"] = DOES_NOT_FIT
        return False
    if on_gpu:
        learner.peak_gib = (torch.cuda.max_memory_allocated(learner.device) - before) / 2**30
    return True


def timed(learners: Sequence[tuple[dict[str, Any], TimedLearner]], steps: int, bar: Any, *, heat: float = HEAT) -> None:
    """Run steps of all models in turns of `TURN` steps, since training runs many in a row.

    On a GPU, it first runs untimed turns for at least `heat` seconds, or 100 steps of each model.
    """
    on_gpu, end = any(learner.device.type == "cuda" for _, learner in learners), time.perf_counter() + heat
    for _ in range(MOST_HEATING // TURN if on_gpu else 0):
        if time.perf_counter() >= end:
            break
        for _ in _turn(learners, TURN):
            pass
        for _, learner in learners:
            learner.clock.between()
    for done in range(0, steps, TURN):
        for _ in _turn(learners, min(TURN, steps - done)):
            bar.update()


def _turn(learners: Sequence[tuple[dict[str, Any], TimedLearner]], steps: int) -> Iterator[None]:
    """Run some steps of each model."""
    for _, learner in learners:
        for _ in range(steps):
            learner.step()
            yield
