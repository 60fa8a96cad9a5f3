"""StateX from end to end: does a model with a larger state, trained on, remember more than the one that it was?

    python tutorials/statex_end_to_end.py --jobs=12     30 models of 36M parameters: 22 minutes of two H200s
    python tutorials/statex_end_to_end.py --small       on a processor, in minutes: the same steps, and no result
    python tutorials/statex_end_to_end.py --rows=reproductions/measured/statex_h200.csv     table, picture of these rows

It trains GLA and Mamba2 on text with needles, makes the state of half of their layers larger in three ways, trains
these and the unchanged model (LPT, long-context post-training) on the same batches of longer documents, and asks all of
them for passkeys and needles, for three models each. Repeating the command continues where it stopped.
"""

import argparse
import csv
import json
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import zoo

# without short convolutions, GLA does not learn to recall a needle from as little text (docs/needles.md)
CONVOLVED = {"qk": {"conv": 4, "activation": "silu"}, "v": {"conv": 4, "activation": "silu"}}
MIXERS: dict[str, list[Any]] = {
    "GLA": ["gla.yaml", {"model": {"stack": {"mixer": {"mixer": CONVOLVED}}}}],
    "Mamba2": ["mamba2.yaml", {"model": {"num_layers": 16}}],
}
# the heads of GLA cannot be merged without changing what it computes: to preserve that, each becomes subheads
FORMS = {"reinit": {}, "inherit": {}, "preserve": {"GLA": {"way": "expand"}}}
SEEDS = [0, 1, 2]
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
NEEDLES = {"packages": {"path": "embedded:packages", "weight": 4, "max_characters": None}}
LONG = {
    "data": {
        "sequence_length": 4096,
        "batch_size": 16,
        "sources": {
            **NEEDLES,
            "needles": {"path": "synthetic:needles:16000", "weight": 1, "max_characters": 60_000_000},
        },
    },
    "optim": {
        "learning_rate": 1.0e-3,
        "schedule": "cosine",
        "warmup_steps": None,
        "warmup_fraction": 0.05,
        "min_learning_rate_ratio": 0.0,
    },
    "trainer": {"max_steps": 460, "val_check_interval": 230},
}
COLUMNS = ["mixer", "form", "seed", "val_loss", "task", "length", "accuracy", "low", "high", "samples"]
# the same steps for a processor
TINY = {"model": {"hidden_size": 32, "num_heads": 2, "num_layers": 4}, "trainer": {"limit_val_batches": 2}}
TINY_BEFORE = {
    "data": {
        "vocab_size": 300,
        "sequence_length": 64,
        "batch_size": 4,
        "num_workers": 0,
        "sources": {
            "packages": {"path": "embedded:documentation", "weight": 4},
            "needles": {"path": "synthetic:needles:200", "weight": 1, "max_characters": 200_000},
        },
    },
    "trainer": {"max_steps": 4, "val_check_interval": 4},
}
TINY_AFTER = {
    "data": {**TINY_BEFORE["data"], "sequence_length": 128},
    "trainer": {"max_steps": 2, "val_check_interval": 2},
}


def trained(folder: Path, mixers: Sequence[str], small: bool, jobs: int) -> dict[tuple[str, int], Path]:
    """The models before: mixer and seed → run."""
    overlays = [TINY, TINY_BEFORE] if small else []
    configs = {name: [MIXERS[name][0], "recall/text.yaml", *MIXERS[name][1:], *overlays] for name in mixers}
    # the base of sweep/recall.yaml, none of whose options another mixer takes over
    base = ["gated_deltanet.yaml", "recall/text.yaml"]
    sweep = {"base": base, "axes": {"mixer": configs}, "seeds": SEEDS[: 1 if small else None]}
    outcomes = zoo.sweep(sweep, folder=folder, jobs=jobs).outcomes
    return {(dict(run.cell)["mixer"], run.seed): folder / run.name for run, _ in outcomes}


def larger(
    before: dict[tuple[str, int], Path], folder: Path, forms: Sequence[str] = (*FORMS, "LPT")
) -> dict[str, Path]:
    """Folders to train on from: the models with a larger state, and as they are."""
    found = {}
    for (mixer, seed), run in before.items():
        for form in forms:
            found[f"{mixer} {form} {seed}"] = output = folder / f"{mixer}-{form}-{seed}"
            if output.exists():
                continue
            if form == "LPT":
                zoo.export(run, output)
            else:
                layers = list(range(0, zoo.load(run).num_layers, 2))
                zoo.statex(run, output, layers=layers, init=form, seed=seed, **FORMS[form].get(mixer, {}))
    return found


def trained_on(starts: dict[str, Path], folder: Path, small: bool, jobs: int) -> dict[str, Path]:
    """The models after: label → run."""
    last = TINY_AFTER if small else {}
    points = {
        label: [
            str(start / "config.yaml"),
            LONG,
            last,
            {"data": {"tokenizer": str(start / "tokenizer.json")}, "optim": {"initial_weights": str(start)}},
        ]
        for label, start in starts.items()
    }
    first = str(next(iter(starts.values())) / "config.yaml")
    outcomes = zoo.sweep({"base": first, "axes": {"start": points}}, folder=folder, jobs=jobs).outcomes
    return {dict(run.cell)["start"]: folder / run.name for run, _ in outcomes}


def evaluated(models: Sequence[Path], folder: Path, small: bool, processes: int) -> list[dict[str, Any]]:
    """The rows of all models, of which each of several processes takes a share."""
    shares = [models[first::processes] for first in range(processes)]
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        found = pool.map(partial(_evaluated, folder, small, gpus), range(processes), shares)
        return [row for rows in tqdm(found, desc="evaluation", total=processes, unit=" shares") for row in rows]


def _evaluated(folder: Path, small: bool, gpus: str, number: int, models: Sequence[Path]) -> list[dict[str, Any]]:
    if gpus:  # before this process looks for one
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus.split(",")[number % len(gpus.split(","))]
    return zoo.evaluate(
        list(map(str, models)),
        "passkey,s_niah_2",
        lengths=[256] if small else LENGTHS,
        samples=2 if small else 64,
        output=folder / f"evaluation-{number}",
        verbose=False,
    )


def measure(folder: Path, mixers: Sequence[str], small: bool, jobs: int) -> Path:
    """All steps; returns the file with what came out, a row for each model, task and length."""
    before = trained(folder / "before", mixers, small, jobs)
    after = trained_on(larger(before, folder / "larger"), folder / "after", small, jobs)
    labels = {run.name: f"{mixer} original {seed}" for (mixer, seed), run in before.items()}
    labels |= {run.name: label for label, run in after.items()}
    # half as many processes as trainings, since 16k tokens in a batch take more memory
    runs = [*before.values(), *after.values()]
    rows = evaluated(runs, folder, small, min(max(jobs // 2, 1), len(runs)))
    losses = {run.name: json.loads((run / "results.json").read_text())["val_loss"] for run in runs}
    file = folder / "statex.csv"
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        for row in rows:
            model = [*labels[row["model"]].split(), losses[row["model"]]]
            writer.writerow([*model, row["task"], row["length"], row["value"], row["low"], row["high"], row["count"]])
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/statex"))
    parser.add_argument("--jobs", type=int, default=max(torch.cuda.device_count(), 1), help="runs at a time")
    parser.add_argument("--rows", type=Path, help="draw what was measured before; train nothing")
    parser.add_argument("--mixers", nargs="+", choices=MIXERS, default=[*MIXERS], help="of which models")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    draw(given.rows or measure(given.folder, given.mixers, given.small, given.jobs), given.folder)


def draw(file: Path, folder: Path) -> None:
    """Recall over the length, a panel for each mixer and task: a line through the medians, and a dot for each model."""
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    curves: dict[tuple[str, str], dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        curve = curves.setdefault((row["mixer"], row["task"]), {}).setdefault(row["form"], {})
        curve.setdefault(int(row["length"]), []).append(float(row["accuracy"]))
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lengths = sorted({int(row["length"]) for row in rows})
    table = Table("mixer", "task", "model", *map(str, lengths), title="median recall")
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    panels = figure.subplots(len(mixers), len(tasks), sharex=True, sharey=True, squeeze=False).flat
    for axes, (mixer, task) in zip(panels, [(mixer, task) for mixer in mixers for task in tasks], strict=True):
        for number, form in enumerate(("original", "LPT", *FORMS)):
            seeds = [curves[mixer, task][form][length] for length in lengths]
            medians = [statistics.median(values) for values in seeds]
            table.add_row(mixer, task, form, *(f"{median:.2f}" for median in medians))
            axes.plot(lengths, medians, color=f"C{number}", marker="_", label=form)
            for length, values in zip(lengths, seeds, strict=True):
                axes.plot([length] * len(values), values, "o", color=f"C{number}", alpha=0.4, markersize=4)
        axes.set(title=f"{mixer}, {task}", xscale="log", xlabel="tokens", ylabel="recall", ylim=(-0.03, 1.03))
        axes.set_xticks(lengths, [f"{length / 1024:g}k" for length in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "statex.png")
    Console().print(table)
    Console().print(f"{file} · {folder}/statex.png", style="dim")


if __name__ == "__main__":
    main()
