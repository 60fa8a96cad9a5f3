"""`zoo.scaling.plan`: what a budget pays for, and a ladder of runs as a sweep."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels import UserError
from mixers import did_you_mean
from zoo.arguments import check_above_0, errors_about, names_in
from zoo.config.build import from_config, instantiate
from zoo.config.find import find_config
from zoo.config.parser import read
from zoo.display import new_console, new_table
from zoo.files.atomic import atomic_write
from zoo.files.safe_yaml import dump_yaml
from zoo.files.sealed_json import read_sealed
from zoo.lm.size_table import parameters_without_embeddings
from zoo.scaling.optima import LEAST_SIZES, Laws
from zoo.scaling.parametric import CHINCHILLA, CHINCHILLA_FLOPS, CHINCHILLA_REPLICATED
from zoo.scaling.power import PowerLaw
from zoo.train.devices import peak_flops

HEAD_SIZE = 64  # of all mixers, so that a size has hidden_size/64 heads
WIDTHS = range(64, 8193, 64)
SPAN, LEAST_SPAN = 32.0, 10.0  # the largest over the smallest size: aimed at, and needed, without embeddings
MOST_SIZES = 20
LEAST_STEPS = 200
WARMUP = 0.02  # of the steps
RATES = (0.5, 2.0)  # times the rule's learning rate, at the smallest and the largest size
PUBLISHED = {"chinchilla": CHINCHILLA, "chinchilla_replicated": CHINCHILLA_REPLICATED}


class Shape(NamedTuple):
    """A size of model."""

    hidden_size: int
    num_layers: int
    num_heads: int

    @property
    def size(self) -> int:
        """Parameters without embeddings, of a mixer with four matrices and a SwiGLU: 12·layers·hidden²."""
        return 12 * self.num_layers * self.hidden_size**2

    @property
    def label(self) -> str:
        """Its name in the sweep."""
        return f"d{self.hidden_size}"

    @property
    def learning_rate(self) -> float:
        """The rule of arXiv 2001.08361 (D.6): 3.239e-3 − 1.395e-4·ln N, with N without embeddings, at least 1e-4."""
        return float(f"{max(3.239e-3 - 1.395e-4 * np.log(self.size), 1e-4):.2g}")


class Rung(NamedTuple):
    """A run of the ladder, with its true numbers of parameters."""

    mixer: str
    shape: Shape
    parameters: int
    without_embeddings: int
    flops: float  # training FLOPs of the whole run, by the model's own count


class Plan(NamedTuple):
    """A ladder of runs.

    Attributes:
        folder: Has sweep.yaml, check_learning_rate.yaml and training.yaml, and is where the runs go.
        rungs: The runs of sweep.yaml.
        tokens: Of each run.
        flops: Training FLOPs of all runs, with those that check the learning rate.
        hours: That they take one device; None if its peak is not known.
        best_size, best_tokens: What the law says is best if one run spends the whole budget.
    """

    folder: Path
    rungs: list[Rung]
    tokens: int
    flops: float
    hours: float | None
    best_size: float
    best_tokens: float


def budget_of(budget: float | None, gpu_hours: float | None, mfu: float, peak: float | None) -> float:
    """The budget in FLOPs, of which one form is given, with the fraction of a peak in FLOP/s that hours are worth.

    Raises:
        UserError: None or both are given, a number is out of range, or the peak is not known.
    """
    if (budget is None) == (gpu_hours is None):
        problem = "none is given" if budget is None else "both are given"
        raise UserError(f"budget: give one of budget and gpu_hours; {problem}")
    if not 0 < mfu <= 1:
        raise UserError(f"mfu: {mfu} must be above 0 and at most 1")
    for name, value in {"budget": budget, "gpu_hours": gpu_hours, "peak": peak}.items():
        if value is not None:
            check_above_0(name, value)
    if budget is not None:
        return budget
    if peak is None or gpu_hours is None:
        raise UserError("gpu_hours: needs the device's peak, which is not known here; give peak=989e12 (FLOP/s, H200)")
    return gpu_hours * 3600 * mfu * peak


def plan(
    mixers: list[str] | str,
    budget: float | None = None,
    gpu_hours: float | None = None,
    mfu: float = 0.4,
    peak: float | None = None,
    sizes: int = 5,
    law: str = "chinchilla",
    output: str = "ladder",
    overlays: list[str] | str | None = None,
    batch_size: int = 32,
    sequence_length: int = 1024,
    verbose: bool = True,
) -> Plan:
    """Plan the runs that a scaling law is fitted to, for a budget, and write them as a sweep.

    ``zoo.scaling.plan("gla,transformer", budget=1e18)``

    All runs see the same number of tokens, which is what the law gives to the largest size.

    Args:
        mixers: Configs of the models to compare, as a list or separated by commas: `gla,gated_deltanet,transformer`.
        budget: Training FLOPs of all runs together, with those that check the learning rate.
        gpu_hours: The budget as hours of one device, in place of `budget`.
        mfu: The fraction of the device's peak that training reaches, such as `bench training` measures.
        peak: The device's peak in FLOP/s; null for that of the GPU at hand.
        sizes: Sizes of each mixer, 4 to 20.
        law: Which sizes and numbers of tokens are best: chinchilla, chinchilla_replicated, or the path of a laws.json,
            whose first law counts.
        output: The folder to make.
        overlays: Configs and overrides for all runs, such as those of the data, as a list or separated by commas.
        batch_size: Sequences in a step, unless an overlay says otherwise.
        sequence_length: Tokens in a sequence, unless an overlay says otherwise.
        verbose: Whether to print the plan.

    Raises:
        UserError: A config does not exist, the budget is given twice, not at all, or pays for too little, or the folder
            exists.
    """
    names, added = names_in(mixers), names_in(overlays)
    for name in names:
        find_config(name)
    stems = {Path(name).stem for name in names}  # the names in the sweep
    if len(stems) < len(names) or not names:
        raise UserError(f"mixers: {mixers!r} must name configs, each name once")
    if not LEAST_SIZES <= sizes <= MOST_SIZES:
        raise UserError(
            f"sizes: {sizes} must be at least {LEAST_SIZES}, so that a law can be fitted, and at most {MOST_SIZES}"
        )
    if peak is None:
        peak = peak_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    flops = budget_of(budget, gpu_hours, mfu, peak)
    laws = law_named(law)
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"output: {folder} exists; name a new folder")

    training: dict[str, Any] = {
        "data": {"batch_size": batch_size, "sequence_length": sequence_length},
        "optim": {"schedule": "constant", "warmup_steps": None, "warmup_fraction": WARMUP},
    }
    shapes = _shapes(flops / len(names), sizes, laws)
    config = read(names[0], training, *added)
    data = instantiate("data", config)
    per_step = data.batch_size * data.sequence_length * (config.trainer.get("accumulate_grad_batches") or 1)
    rungs, steps, spent = _ladder(names, shapes, [training, *added], flops, per_step)
    training["trainer"] = {
        "max_steps": steps,
        "val_check_interval": max(steps // 10, 1),
        "log_every_n_steps": max(steps // 500, 1),
    }
    try:
        _write(folder, names, added, shapes, training)
    except OSError as error:
        raise UserError(f"output: {folder} cannot be written to: {error.strerror}") from None
    hours = None if peak is None else spent / (mfu * peak) / 3600
    made = Plan(folder, rungs, steps * per_step, spent, hours, float(laws.size(flops)), float(laws.tokens(flops)))
    if verbose:
        _show(made, flops, law, None if hours is None else hours / spent)
    return made


def law_named(name: str) -> Laws:
    """A published law by its name, or the first one of a `laws.json`, for C in FLOPs.

    Raises:
        UserError: The name is neither a law nor a file, or the file is damaged.
    """
    if name in PUBLISHED:
        return PUBLISHED[name].laws(CHINCHILLA_FLOPS)
    if not Path(name).is_file():
        hint = did_you_mean(name, PUBLISHED)
        raise UserError(f"law: {name!r} is neither a file nor one of {', '.join(PUBLISHED)}{hint}")
    with errors_about("law"):
        content = read_sealed(name, advice="name a laws.json that scaling fit wrote")
        if not content.get("laws"):
            raise UserError(f"{name} is not a laws.json of scaling fit")
    row = content["laws"][0]
    parts = (
        PowerLaw(row[f"{part}_coefficient"], row[f"{part}_exponent"], row.get(f"{part}_offset", 0.0))
        for part in Laws._fields
    )
    return Laws(*parts)


def _ladder(
    names: Sequence[str], shapes: Sequence[Shape], settings: Sequence[str | dict[str, Any]], flops: float, per_step: int
) -> tuple[list[Rung], int, float]:
    """The runs that a budget pays for, the steps of each, and the FLOPs of all, with those that check the rate."""
    costs = [[_count(name, shape, settings) for shape in shapes] for name in names]
    checks = len(RATES) * sum(row[0].flops + row[-1].flops for row in costs)
    per_token = sum(rung.flops for row in costs for rung in row) + checks
    steps = int(flops / per_token / per_step)
    if steps < LEAST_STEPS:
        raise UserError(
            f"budget: {flops:.3g} FLOPs pay for {steps} steps of {per_step:,} tokens in each run, fewer than "
            f"{LEAST_STEPS}; give more, or a smaller batch_size or sequence_length"
        )
    tokens = steps * per_step
    rungs = [rung._replace(flops=rung.flops * tokens) for row in costs for rung in row]
    counts = [rung.without_embeddings for rung in rungs]
    if max(counts) < LEAST_SPAN * min(counts):
        raise UserError(
            f"sizes: the largest model would have {max(counts) / min(counts):.1f} times the parameters of the "
            f"smallest, and {LEAST_SPAN:g} times are needed; give a larger budget"
        )
    return rungs, steps, per_token * tokens


def _shapes(flops: float, count: int, laws: Laws) -> list[Shape]:
    """The largest ladder of sizes that a mixer's share of the budget pays for, by 6·N FLOPs per token."""
    every = [Shape(d, min(max(round(d / 48), 2), 32), d // HEAD_SIZE) for d in WIDTHS]
    best: list[Shape] = []
    cheapest = np.inf
    for top in range(count - 1, len(every)):
        chosen = _spread(every[: top + 1], count)
        if chosen[-1].size < LEAST_SPAN * chosen[0].size:
            continue
        trained = sum(shape.size for shape in chosen) + len(RATES) * (chosen[0].size + chosen[-1].size)
        budget = (chosen[-1].size / laws.size.coefficient) ** (1 / laws.size.exponent)  # for which it is the best size
        needed = 6 * trained * float(laws.tokens(budget))
        cheapest = min(cheapest, needed)
        if needed <= flops:
            best = chosen
    if not best:
        raise UserError(
            f"budget: {flops:.3g} FLOPs for each mixer do not pay for {count} sizes; the smallest ladder needs about "
            f"{cheapest:.2g}"
        )
    if best[-1] == every[-1] and flops > 2 * needed:
        raise UserError(
            f"budget: {flops:.3g} FLOPs for each mixer are far more than the largest ladder takes, which ends at "
            f"{WIDTHS[-1]} channels, about {needed:.2g}"
        )
    return best


def _spread(every: Sequence[Shape], count: int) -> list[Shape]:
    """`count` sizes up to the last, as evenly over log N as there are any, over a range of `SPAN` if possible."""
    logs = np.log([shape.size for shape in every])
    targets = np.linspace(max(logs[-1] - np.log(SPAN), logs[0]), logs[-1], count)
    chosen = np.abs(logs[:, None] - targets).argmin(0)
    for i in range(count - 2, -1, -1):  # different ones
        chosen[i] = min(chosen[i], chosen[i + 1] - 1)
    for i in range(count):  # room below for the others
        chosen[i] = max(chosen[i], i)
    return [every[i] for i in chosen]


def _count(name: str, shape: Shape, settings: Sequence[str | dict[str, Any]]) -> Rung:
    """A run's true parameters and its training FLOPs per token, without allocating memory for the model."""
    config = read(name, *settings, _sized(shape))
    length = instantiate("data", config).sequence_length
    config.model.vocab_size = config.model.vocab_size or config.data.init_args.get("vocab_size") or 1024
    model = from_config(config, device="meta")
    outside = parameters_without_embeddings(model)
    return Rung(Path(name).stem, shape, model.num_parameters(), outside, 3 * model.flops(length) / length)


def _sized(shape: Shape, times: float = 1.0) -> dict[str, Any]:
    """The overlay of a size, with a multiple of the rule's learning rate."""
    return {"model": shape._asdict(), "optim": {"learning_rate": shape.learning_rate * times}}


def _write(
    folder: Path, names: Sequence[str], added: Sequence[str], shapes: Sequence[Shape], training: dict[str, Any]
) -> None:
    """Write the files of a ladder."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = [str(folder / "training.yaml"), *added]
    mixers = {Path(name).stem: [name if name.endswith(".yaml") else f"{name}.yaml", *shared] for name in names}
    checks = {f"{s.label}-lr-x{times:g}": _sized(s, times) for s in (shapes[0], shapes[-1]) for times in RATES}
    for file, about, points in (
        ("sweep.yaml", "The ladder", {shape.label: _sized(shape) for shape in shapes}),
        ("check_learning_rate.yaml", "Other learning rates at the smallest and the largest size", checks),
    ):
        content = {
            "base": next(iter(mixers.values())),
            "axes": {"mixer": mixers, "size": points},
            "metric": "val_loss",
            "x": "parameters_without_embeddings",
            "runs_in": str(folder),
        }
        command = f"python cli.py sweep --config {folder / file}"
        _write_yaml(folder / file, f"{about}. From the folder where it was planned:\n#\n#   {command}\n#", content)
    _write_yaml(folder / "training.yaml", "What all runs of the ladder share.", training)


def _write_yaml(path: Path, header: str, content: dict[str, Any]) -> None:
    plain = json.loads(json.dumps(content))  # no anchors for repeated lists
    with atomic_write(path) as file:
        file.write(f"# {header}\n{dump_yaml(plain)}".encode())


def _show(made: Plan, budget: float, law: str, hours_per_flop: float | None) -> None:
    table = new_table(["mixer", "hidden", "layers", "parameters", "non-emb.", "rate", "FLOPs", "6·N·D", "hours"])
    for rung in made.rungs:
        hours = "?" if hours_per_flop is None else f"{rung.flops * hours_per_flop:.2f}"
        shape = rung.shape
        counts = (f"{rung.parameters:,}", f"{rung.without_embeddings:,}", f"{shape.learning_rate:g}")
        flops = (f"{rung.flops:.1e}", f"{6 * rung.without_embeddings * made.tokens:.1e}")
        table.add_row(rung.mixer, str(shape.hidden_size), str(shape.num_layers), *counts, *flops, hours)
    console = new_console()
    console.print(table)
    unknown = "an unknown time (give peak=989e12, for an H200)"
    hours = unknown if made.hours is None else f"{made.hours:.2f} hours of one device"
    lines = (
        f"each run sees {made.tokens:,} tokens; all, with the checks of the learning rate, take {made.flops:.3g} FLOPs "
        f"and {hours}",
        f"one run with the whole budget of {budget:.3g} FLOPs is best with {made.best_size:.3g} parameters and "
        f"{made.best_tokens:.3g} tokens ({law})",
        f"python cli.py sweep --config {made.folder / 'sweep.yaml'}",
        f"python cli.py sweep --config {made.folder / 'check_learning_rate.yaml'}",
        f"python cli.py scaling fit {made.folder}",
    )
    console.print(*lines, sep="\n", highlight=False, soft_wrap=True)
