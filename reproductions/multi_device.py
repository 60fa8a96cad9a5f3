"""Measure how training scales with the number of devices, by `fit` in separate processes.

    python reproductions/multi_device.py --config gated_deltanet.yaml --config size/400m.yaml --devices=[1,2,4]

The results are a table, bench.json and bench.png; the exit code is 1 if a loss differs from that of one device.
"""

import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich.table import Table

from kernels import Option, UserError
from mixers import did_you_mean
from mixers.arguments import check_sizes
from reproductions.pictured_report import PICTURE, PicturedReport
from reproductions.step_times import PARTS
from zoo import config as configs
from zoo.arguments import check_names
from zoo.config.command_line import Keys, arguments_of
from zoo.display import new_figure, progress_bar
from zoo.experiments.runner import COMMAND
from zoo.performance import model as models
from zoo.performance.accuracy import Gate
from zoo.performance.bench_report import Report, captioned, formatted, is_wrong, show, without
from zoo.performance.device import described
from zoo.train.metrics_file import read_metrics
from zoo.train.module import best_precision
from zoo.train.signals import sigterm_raises

# the last line of a traceback, or the line of a UserError
REASON = re.compile(r"(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception)|error): .+)")
LONGEST = 160  # characters of a reason, at most


class Unsaved(Callback):
    """Disables checkpoints, which for a large model would take longer than the steps, and fill the disk."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replace `save_checkpoint` by a function that does nothing."""
        trainer.save_checkpoint = lambda *_, **__: None


class Outcome(NamedTuple):
    """The results of a run."""

    losses: list[float]  # `train_loss` of the logged steps, in nats; nan where it is not finite
    numbers: dict[str, Any]  # speed and memory; empty for a failed run
    note: str | None = None  # why the run failed


def run(folder: Path, arguments: Sequence[str], threads: str) -> int:
    """Train in `folder`, with the output in `folder.log` and `threads` for each process, and return the exit code.

    No process of the run outlives the call, however that ends.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    environment.pop("ZOO_RUN", None)
    command = [*COMMAND, *arguments, "--run", folder.absolute().as_posix()]
    with folder.with_name(f"{folder.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            return process.wait()
        finally:
            if os.name == "nt":
                process.kill()
            else:
                with suppress(ProcessLookupError, PermissionError):  # all have ended
                    os.killpg(process.pid, signal.SIGKILL)  # with its child processes
            process.wait()


def outcome(folder: Path, code: int, warm_up: int, interval: int, on_gpu: bool) -> Outcome:
    """Read the results of a run whose metrics have a row each `interval` steps, without its first `warm_up` steps."""
    if code:
        return Outcome([], {}, reason(folder.with_name(f"{folder.name}.log"), code))
    rows = read_metrics(folder / "metrics.jsonl")
    losses = [math.nan if (loss := row["train_loss"]) is None else loss for row in rows if "train_loss" in row]
    timed = [row for row in rows if f"seconds_{PARTS[0]}" in row and row["step"] + 1 - interval >= warm_up]
    if not timed:
        return Outcome(losses, {}, "no step was timed")
    seconds = statistics.median(sum(row[f"seconds_{part}"] for part in PARTS) for row in timed)
    tokens = timed[-1]["tokens"] / (timed[-1]["step"] + 1)
    numbers = {
        "tokens_per_second": tokens / seconds,
        "step_ms": 1e3 * seconds,
        "parts_ms": {part: _median_ms(timed, f"seconds_{part}") for part in PARTS},
        "communication_ms": _median_ms(timed, "seconds_communication"),
        "peak_gib": max((row["peak_memory_gib"] for row in timed), default=None) if on_gpu else None,
    }
    return Outcome(losses, numbers)


def _median_ms(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """The median of a metric in seconds, in milliseconds; None if it is not logged."""
    seconds = [row[name] for row in rows if name in row]
    return 1e3 * statistics.median(seconds) if seconds else None


def reason(log: Path, code: int) -> str:
    """Why a run failed: the last error in its log, or the last out-of-memory error, which may have caused others."""
    text = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [match[1] for line in lines if (match := REASON.match(line))]
    of_memory = [line for line in errors if "OutOfMemory" in line]
    message = next(reversed(of_memory or errors or lines), "its log is empty")
    return f"exit code {code}: {message[:LONGEST]}{' …' * (len(message) > LONGEST)}"


ONE = "one device"
CALLBACKS = "[reproductions.multi_device.Unsaved, reproductions.step_times.StepTimes]"  # of each run
WARM_UP = 4  # steps
WINDOWS = 10  # windows of steps, over which the median is taken
LIMITS = {"32-true": 1e-4}  # largest relative difference of two losses
LOW_PRECISION = 1e-2
FITS = re.compile(r"(one-device|[\w.]+-[0-9]+)(\.log)?")  # names of runs and their logs


class Way(NamedTuple):
    """A strategy: an overlay in configs/train that divides the work among devices."""

    name: str
    shares_sequences: bool  # otherwise each device has separate sequences


class Fit(NamedTuple):
    """A run to measure."""

    name: str  # name of its folder
    arguments: list[str]
    way: str | None  # strategy in the table; None for a reference, which is not in the table
    devices: int  # for a reference, the number of devices that it represents
    reference: str | None  # the run on one device whose losses it must match


class ScalingReport(PicturedReport):
    """Training on several devices."""

    benchmark = "scaling"

    def table(self) -> Table:
        """A row for each strategy and number of devices."""
        about = self.about
        parts = list(next((row["parts_ms"] for row in self.rows if "parts_ms" in row), ()))
        optional = {"communication_ms": "waits", "peak_gib": "GiB"}  # not measured everywhere
        optional = {key: name for key, name in optional.items() if any(row.get(key) is not None for row in self.rows)}
        names = [*optional.values()]
        table = self.new_table(["way", "devices", "tok/s", "efficiency", "step ms", *parts, *names, "loss differs"])
        remarks = [
            f"batch {about['batch_size']} × {about['length']} tokens per device, or per group that shares sequences",
            "efficiency: tokens/s relative to those of one device times the number of devices",
            *([f"{', '.join((*parts, *names))}: of the first device; parts of a step in ms"] if parts else []),
            *(["waits: the end of backward, waiting for gradients of other devices"] if "waits" in names else []),
            "loss differs: largest relative difference from one device on the same samples",
        ]
        for row in self.rows:
            head = [row["way"], str(row["devices"])]
            if "step_ms" not in row or is_wrong(row):
                without(table, remarks, head, row)
                continue
            table.add_row(
                *head,
                f"{row['tokens_per_second']:,.0f}",
                formatted(row["efficiency"], "{:.0%}"),
                *(f"{value:.1f}" for value in (row["step_ms"], *row["parts_ms"].values())),
                *(formatted(row[key], "{:.1f}") for key in optional),
                formatted(row["loss_difference"], "{:.0e}"),
            )
            remarks += [f"{' '.join(head)}: {row['note']}"] if "note" in row else []
        return captioned(table, remarks)

    def picture(self) -> Figure | None:
        """Plots of tokens per second and of GPU memory over the number of devices, one line per strategy."""
        rows = [row for row in self.rows if "step_ms" in row and not is_wrong(row)]
        base = next((row for row in rows if row["devices"] == 1), None)
        devices = sorted({row["devices"] for row in rows})
        if len(devices) < 2:
            return None
        with_memory = any(row["peak_gib"] is not None for row in rows)
        picture = new_figure(10 if with_memory else 6, 4.2)
        panels = {"tokens_per_second": "tokens/s, all devices together"}
        panels |= {"peak_gib": "GiB of the first device"} if with_memory else {}
        for place, (key, label) in enumerate(panels.items(), start=1):
            axes = picture.add_subplot(1, len(panels), place, xlabel="devices", ylabel=label)
            if base is not None and key == "tokens_per_second":
                ideal = [n * base[key] for n in devices]
                axes.plot(devices, ideal, color="gray", linestyle="--", linewidth=1, label="ideal")
            for way in dict.fromkeys(row["way"] for row in rows if row is not base):
                line = [row for row in rows if row is base or row["way"] == way]
                axes.plot([row["devices"] for row in line], [row[key] for row in line], marker="o", label=way)
            axes.set_xticks(devices, [str(n) for n in devices])
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        picture.axes[0].legend(fontsize="small")
        about = self.about
        picture.suptitle(
            f"{about['device']}, {about['precision']}, {about['batch_size']} × {about['length']}", fontsize=10
        )
        return picture


def multi_device(
    config: Sequence[str],
    ways: list[str] | None = None,
    devices: list[int] | None = None,
    batch_size: int | None = None,
    length: int | None = None,
    steps: int = 20,
    accelerator: str | None = None,
    precision: str | None = None,
    curves: bool = True,
    folder: str = "runs/multi-device",
) -> Report:
    """Train on one and on several devices, with each strategy, and compare speed, memory and losses.

    Every run is `fit` on a synthetic Markov chain. With a data-parallel strategy each device has a separate batch, and
    the losses must match those of one device that accumulates gradients over the same samples. A strategy that shares
    sequences divides the batch of one device.

    Args:
        config: Configs and `key=value` overrides, in order.
        ways: Strategies, by the names of overlays in configs/train; null for ddp, zero1, zero2 and zero3.
        devices: Numbers of devices; null for 1, 2, 4 … up to the number of GPUs, or 1 and 2 processes on a CPU. One
            device is always measured, as the baseline of the efficiency.
        batch_size: Sequences per device, or per group of devices that share them; null for the config's.
        length: Tokens in a sequence; null for the config's.
        steps: Number of steps to time, after a few to warm up.
        accelerator: cpu or gpu; null for the GPUs if available.
        precision: 32-true, bf16-true, 16-true or bf16-mixed; null for the config's, or else bf16-mixed on a GPU and
            32-true on a CPU.
        curves: Whether to train, for each number of devices, the reference for data-parallel losses.
        folder: The folder of bench.json, bench.png and the runs.

    Raises:
        UserError: An argument is invalid.
    """
    chosen = [_way(name) for name in dict.fromkeys(("ddp", "zero1", "zero2", "zero3") if ways is None else ways)]
    accelerator = _accelerator(accelerator)
    devices = _devices(devices, accelerator)
    if not config:
        raise UserError("config: missing; give a model, such as ", Option("config", "gated_deltanet.yaml"))
    parsed = configs.read(*config)
    data = parsed.data.get("init_args") or {}
    batch_size = batch_size if batch_size is not None else data.get("batch_size", 8)
    length = length if length is not None else data.get("sequence_length", 1024)
    precision = precision or parsed.trainer.precision or best_precision(accelerator)
    models.check_options(precision, batch_size=batch_size, length=length, steps=steps)
    interval = max(steps // WINDOWS, 1)
    settings = {
        "data": "MarkovChain",
        "data.vocab_size": parsed.model.vocab_size or data.get("vocab_size") or configs.vocabulary(parsed),
        "data.sequence_length": length,
        "trainer.accelerator": accelerator,
        "trainer.precision": precision,
        "trainer.max_steps": WARM_UP + steps,
        "trainer.log_every_n_steps": interval,
        "trainer.limit_val_batches": 0,
        "trainer.callbacks+": CALLBACKS,
        "loss_curve.every_n_steps": WARM_UP + steps,  # reading a loss waits for the device
    }
    plan = _plan(config, settings, chosen, devices, batch_size, parsed.trainer.accumulate_grad_batches, curves)

    threads = os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // devices[-1], 1))
    about = described(torch.device("cuda" if accelerator == "gpu" else "cpu"))
    about |= {"device": f"cpu, threads of a process: {threads}"} if accelerator == "cpu" else {}
    about |= {"config": list(config), "batch_size": batch_size, "length": length, "precision": precision}
    about |= {"steps": steps, "references": []}
    report = ScalingReport(Path(folder), about)
    runs = _emptied(report)
    outcomes: dict[str, Outcome] = {}
    with progress_bar(total=len(plan), desc="scaling", unit=" runs") as bar, sigterm_raises():
        for fit in plan:
            bar.set_postfix_str(fit.name)
            code = run(runs / fit.name, fit.arguments, threads)
            outcomes[fit.name] = outcome(runs / fit.name, code, WARM_UP, interval, accelerator == "gpu")
            row = _row(fit, outcomes, LIMITS.get(precision, LOW_PRECISION))
            (about["references"] if fit.way is None else report.rows).append(row)
            report.write()  # after every run, so that an interruption loses nothing
            bar.update()
    return report


def _way(name: str) -> Way:
    folder = configs.CONFIGS / "train"
    way_names = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in way_names:
        raise UserError(f"ways: {name!r} is not a file in configs/train{did_you_mean(name, way_names)}")
    keys = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    return Way(name, keys.get("context_parallel", 1) > 1)


def _accelerator(name: str | None) -> str:
    available = torch.cuda.is_available()
    if name is None:
        return "gpu" if available else "cpu"
    check_names("accelerator", [name], ["cpu", "gpu"])
    if name == "gpu" and not available:
        raise UserError("accelerator: PyTorch finds no GPU on this machine; leave accelerator out for the CPU")
    return name


def _devices(numbers: list[int] | None, accelerator: str) -> list[int]:
    """The numbers of devices, ascending from 1."""
    available = torch.cuda.device_count() if accelerator == "gpu" else None
    if numbers is None:
        numbers = [2**i for i in range((available or 2).bit_length())]
    for number in numbers:
        check_sizes({"devices": number})
        if available is not None and number > available:
            raise UserError(f"devices: {number} is more than the GPUs of this machine, {available}")
    return sorted({1, *numbers})


def _plan(
    config: Sequence[str],
    settings: dict[str, Any],
    ways: Sequence[Way],
    devices: Sequence[int],
    batch_size: int,
    accumulated: int,
    curves: bool,
) -> list[Fit]:
    """All runs, with references before the runs that are compared with them.

    A batch on n devices consists of n consecutive batches of one device, so accumulating n of them gives a step on the
    same samples.
    """

    def arguments(number: int, sequences: int, way: Way | None, *more: str) -> list[str]:
        items = [*config, f"train/{way.name}.yaml" if way else "trainer.strategy=auto"]
        items += [f"{key}={value}" for key, value in settings.items()]
        items += [f"data.batch_size={sequences}", f"trainer.devices={number}", *more]
        configs.read(*items)  # reports mistakes before any run starts
        is_key = ["=" in item and not item.startswith("{") for item in items]
        pairs = zip(items, is_key, strict=True)
        return ["fit", *(part for item, key in pairs for part in ([f"--{item}"] if key else ["--config", item]))]

    base = Fit("one-device", arguments(1, batch_size, None), ONE, 1, None)
    plan = [base]
    for n in devices[1:]:
        reference = f"reference-{n}"
        if curves and not all(way.shares_sequences for way in ways):
            steps = arguments(1, batch_size, None, f"trainer.accumulate_grad_batches={n * accumulated}")
            plan.append(Fit(reference, steps, None, n, None))
        for way in ways:
            name = f"{way.name}-{n}"
            if way.shares_sequences:
                shared = arguments(n, batch_size, way, f"context_parallel={n}")
                plan.append(Fit(name, shared, way.name, n, base.name))
            else:
                plan.append(Fit(name, arguments(n, n * batch_size, way), way.name, n, reference))
    return plan


def _emptied(report: Report) -> Path:
    """The folder of the runs, after removing those of an earlier benchmark."""
    runs = report.folder / "fits"
    if runs.exists():
        if not (report.folder / "bench.json").is_file():
            raise UserError(f"folder: {runs} exists and does not belong to a benchmark; choose another folder")
        if other := next((path for path in sorted(runs.iterdir()) if not FITS.fullmatch(path.name)), None):
            raise UserError(f"folder: {other} is not a run of a benchmark; move it, or choose another folder")
        shutil.rmtree(runs)
    (report.folder / PICTURE).unlink(missing_ok=True)
    runs.mkdir(parents=True)
    report.write()
    return runs


def _row(fit: Fit, outcomes: dict[str, Outcome], limit: float) -> dict[str, Any]:
    """The row of a run, with a gate for whether its losses match those of its reference."""
    measured, base, reference = (outcomes.get(name or "") for name in (fit.name, "one-device", fit.reference))
    assert measured is not None
    assert base is not None
    row = {"way": fit.way, "devices": fit.devices, **measured.numbers}
    speed, base_speed = (outcome.numbers.get("tokens_per_second") for outcome in (measured, base))
    row["efficiency"] = None if speed is None or base_speed is None else speed / (fit.devices * base_speed)
    row |= {"loss_difference": None, "losses": [x if math.isfinite(x) else None for x in measured.losses]}
    row["command"] = shlex.join(["python", "cli.py", *fit.arguments])
    if measured.note is not None:
        row["note"] = measured.note
    elif reference is not None and reference.note is not None:
        row["note"] = f"no reference for its losses: {reference.note}"
    elif reference is not None:
        gate = Gate({"loss": largest_difference(measured.losses, reference.losses)}, {"loss": limit})
        row["gate"] = gate.record()
        row["loss_difference"] = row["gate"]["errors"]["loss"]
        row |= {} if gate.passed else {"note": gate.says}
    return row


def largest_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two curves; infinite if they are empty, not finite, or of unequal length."""
    if len(losses) != len(expected) or not losses or not all(map(math.isfinite, (*losses, *expected))):
        return math.inf
    return max(abs(x - y) / abs(y) for x, y in zip(losses, expected, strict=True))


def main(arguments: list[str]) -> int:
    """Run the command line; return 1 if a result was wrong."""
    items, options = arguments_of(multi_device, arguments, "multi_device", Keys(configs.KEYS, lambda parser: None))
    return int(show(multi_device(items, **options)).failed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error.on_command_line}")
