"""`bench scaling`: how training scales over devices, measured by `fit` itself."""

import math
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from tqdm import tqdm

from kernels import UserError
from mixers import did_you_mean
from zoo import config as configs
from zoo.benchmarks import model as models
from zoo.benchmarks.device import described
from zoo.benchmarks.fits import Outcome, Unsaved, outcome, run
from zoo.benchmarks.gate import Gate
from zoo.benchmarks.report import Report
from zoo.train.module import best_precision
from zoo.train.signals import sigterm_raises

ONE = "one device"
WARM_UP = 4  # steps
WINDOWS = 10  # of steps, whose median counts
LIMITS = {"32-true": 1e-4}  # of the relative difference of two losses
LOW_PRECISION = 1e-2


class Way(NamedTuple):
    """An overlay in configs/train that shares the work among devices."""

    name: str
    shares_sequences: bool  # else each device has sequences of its own

    @property
    def overlay(self) -> str:
        """Its name among the configs."""
        return f"train/{self.name}.yaml"


class Fit(NamedTuple):
    """A run that is to be measured."""

    name: str  # of its folder
    arguments: list[str]
    way: str | None  # of the row in the table; None for a mere reference
    devices: int  # or as many as it stands for
    reference: str | None  # the run on one device whose losses it must have


def bench_scaling(
    config: Sequence[str],
    ways: list[str] | None = None,
    devices: list[int] | None = None,
    batch_size: int | None = None,
    length: int | None = None,
    steps: int = 20,
    accelerator: str | None = None,
    precision: str | None = None,
    curves: bool = True,
    folder: str = "runs/bench-scaling",
) -> Report:
    """Train on one device and on several, each way to share the work in turn, and compare speed, memory and losses.

    Every run is `fit` on a made-up Markov chain. With a data-parallel way each device has a batch of its own, and the
    losses must be those of one device that adds up the gradients of the same samples; a way that shares sequences
    divides the batch of one device.

    Args:
        config: Configs and `key=value` overrides, in order.
        ways: Names of overlays in configs/train; null for ddp, zero1, zero2 and zero3.
        devices: Numbers of devices; null for 1, 2, 4 … up to the GPUs there are, or 1 and 2 processes on a processor.
            One device is measured in any case, as the base of the efficiency.
        batch_size: Sequences of each device at a time, or of all devices that share them; null for the config's.
        length: Tokens of a sequence; null for the config's.
        steps: How many to time, after a few to warm up.
        accelerator: cpu or gpu; null for the GPUs if there are any.
        precision: 32-true, bf16-true, 16-true or bf16-mixed; null for the config's, or for bf16-mixed on a GPU and
            32-true on a processor.
        curves: Whether to train, for each number of devices, the run that data-parallel losses are compared with.
        folder: Where bench.json, bench.png and the runs go.

    Raises:
        UserError: An argument is wrong.
    """
    chosen = [_way(name) for name in dict.fromkeys(("ddp", "zero1", "zero2", "zero3") if ways is None else ways)]
    accelerator = _accelerator(accelerator)
    devices = _devices(devices, accelerator)
    if not config:
        raise UserError("config: there is none; give a model, such as --config gated_deltanet.yaml")
    found = configs.read(*config)
    data = found.data.get("init_args") or {}
    batch_size = batch_size if batch_size is not None else data.get("batch_size", 8)
    length = length if length is not None else data.get("sequence_length", 1024)
    precision = precision or found.trainer.precision or best_precision(accelerator)
    models.check_precision(precision)
    models.check_sizes(batch_size=batch_size, length=length, steps=steps)
    every = max(steps // WINDOWS, 1)
    settings = {
        "data": "MarkovChain",
        "data.vocab_size": found.model.vocab_size or data.get("vocab_size") or configs.vocabulary(found),
        "data.sequence_length": length,
        "trainer.accelerator": accelerator,
        "trainer.precision": precision,
        "trainer.max_steps": WARM_UP + steps,
        "trainer.log_every_n_steps": every,
        "trainer.limit_val_batches": 0,
        "trainer.callbacks+": f"{Unsaved.__module__}.{Unsaved.__name__}",
        "loss_curve.every_n_steps": WARM_UP + steps,  # reading a loss waits for the device
    }
    plan = _plan(config, settings, chosen, devices, batch_size, found.trainer.accumulate_grad_batches, curves)

    threads = os.environ.get("OMP_NUM_THREADS") or str(max((os.cpu_count() or 1) // devices[-1], 1))
    about = described(torch.device("cuda" if accelerator == "gpu" else "cpu"))
    about |= {"device": f"cpu, threads of a process: {threads}"} if accelerator == "cpu" else {}
    about |= {"config": list(config), "batch_size": batch_size, "length": length, "precision": precision}
    about |= {"steps": steps, "references": []}
    report = Report("scaling", Path(folder), about)
    runs = _emptied(report)
    outcomes: dict[str, Outcome] = {}
    with tqdm(total=len(plan), desc="scaling", unit=" runs", dynamic_ncols=True) as bar, sigterm_raises():
        for fit in plan:
            bar.set_postfix_str(fit.name)
            code = run(runs / fit.name, fit.arguments, threads)
            outcomes[fit.name] = outcome(runs / fit.name, code, WARM_UP, every, accelerator == "gpu")
            row = _row(fit, outcomes, LIMITS.get(precision, LOW_PRECISION))
            (about["references"] if fit.way is None else report.rows).append(row)
            report.write()  # what was measured stays, whatever comes next
            bar.update()
    return report


def _way(name: str) -> Way:
    folder = configs.CONFIGS / "train"
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise UserError(f"ways: {name!r} is no file in configs/train{did_you_mean(name, known)}")
    keys = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    return Way(name, keys.get("context_parallel", 1) > 1)


def _accelerator(name: str | None) -> str:
    there = torch.cuda.is_available()
    if name is None:
        return "gpu" if there else "cpu"
    if name not in ("cpu", "gpu"):
        raise UserError(f"accelerator: {name!r} is not one of cpu, gpu{did_you_mean(name, ['cpu', 'gpu'])}")
    if name == "gpu" and not there:
        raise UserError("accelerator: PyTorch finds no GPU on this machine; leave --accelerator out for the CPU")
    return name


def _devices(numbers: list[int] | None, accelerator: str) -> list[int]:
    """The numbers of devices, ascending from 1."""
    there = torch.cuda.device_count() if accelerator == "gpu" else None
    if numbers is None:
        numbers = [2**i for i in range((there or 2).bit_length())]
    for number in numbers:
        models.check_sizes(devices=number)
        if there is not None and number > there:
            raise UserError(f"devices: {number} is more than the GPUs of this machine, {there}")
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
    """All runs, those on one device before the ones that are compared with them.

    A batch of n devices is n batches of one device that follow one another, so that adding up n of them is a step on
    the same samples.
    """

    def arguments(number: int, sequences: int, way: Way | None, *more: str) -> list[str]:
        items = [*config, way.overlay if way else "trainer.strategy=auto"]
        items += [f"{key}={value}" for key, value in settings.items()]
        items += [f"data.batch_size={sequences}", f"trainer.devices={number}", *more]
        configs.read(*items)  # a mistake should not wait for its turn
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
    """The folder of the runs, without those of an earlier benchmark."""
    runs = report.folder / "fits"
    if runs.exists():
        if not (report.folder / "bench.json").is_file():
            raise UserError(f"folder: {runs} exists and is of no benchmark; choose another --folder")
        shutil.rmtree(runs)
    (report.folder / "bench.png").unlink(missing_ok=True)
    runs.mkdir(parents=True)
    report.write()
    return runs


def _row(fit: Fit, outcomes: dict[str, Outcome], limit: float) -> dict[str, Any]:
    """What is reported of a run; its gate says whether its losses are those of its reference."""
    found, base, reference = (outcomes.get(name or "") for name in (fit.name, "one-device", fit.reference))
    assert found is not None
    assert base is not None
    row = {"way": fit.way, "devices": fit.devices, **found.numbers}
    speed, alone = (one.numbers.get("tokens_per_second") for one in (found, base))
    row["efficiency"] = None if speed is None or alone is None else speed / (fit.devices * alone)
    row |= {"loss_difference": None, "losses": [x if math.isfinite(x) else None for x in found.losses]}
    row["command"] = shlex.join(["python", "cli.py", *fit.arguments])
    if found.note is not None:
        row["note"] = found.note
    elif reference is not None and reference.note is not None:
        row["note"] = f"nothing to compare its losses with: {reference.note}"
    elif reference is not None:
        gate = Gate({"loss": largest_difference(found.losses, reference.losses)}, {"loss": limit})
        row["gate"] = gate.record()
        row["loss_difference"] = row["gate"]["errors"]["loss"]
        row |= {} if gate.passed else {"note": gate.says}
    return row


def largest_difference(losses: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference of two curves; infinite if they differ in length or hold no numbers."""
    if len(losses) != len(wanted) or not losses or not all(map(math.isfinite, (*losses, *wanted))):
        return math.inf
    return max(abs(x - y) / abs(y) for x, y in zip(losses, wanted, strict=True))
