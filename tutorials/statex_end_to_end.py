"""StateX from end to end: does a model with a larger state, trained on, remember more than the one that it was?

    python tutorials/statex_end_to_end.py               on GPUs: 30 models of 36M parameters
    python tutorials/statex_end_to_end.py --small       on a processor, in minutes: the same steps, and no result

It trains GLA and Mamba2 on text with needles, makes the state of half of their layers larger in three ways, trains
these and the unchanged model (LPT, long-context post-training) on equal tokens of longer documents, and asks all of
them for passkeys and needles, three seeds each. Repeating the command continues where it stopped.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

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


def trained(folder: Path, small: bool, jobs: int | None) -> dict[tuple[str, int], Path]:
    """The models before: mixer and seed → run."""
    overlays = [TINY, TINY_BEFORE] if small else []
    configs = {name: [first, "recall/text.yaml", *rest, *overlays] for name, (first, *rest) in MIXERS.items()}
    # the base of sweep/recall.yaml, none of whose options another mixer takes over
    base = ["gated_deltanet.yaml", "recall/text.yaml"]
    sweep = {"base": base, "axes": {"mixer": configs}, "seeds": SEEDS[: 1 if small else None]}
    outcomes = zoo.sweep(sweep, folder=folder, jobs=jobs).outcomes
    return {(dict(run.cell)["mixer"], run.seed): folder / run.name for run, _ in outcomes}


def larger(before: dict[tuple[str, int], Path], folder: Path) -> dict[str, Path]:
    """Folders to train on from: the models with a larger state, and as they are."""
    found = {}
    for (mixer, seed), run in before.items():
        for form, special in FORMS.items():
            found[f"{mixer} {form} {seed}"] = output = folder / f"{mixer}-{form}-{seed}"
            if not output.exists():
                layers = list(range(0, zoo.load(run).num_layers, 2))
                zoo.statex(run, output, layers=layers, init=form, seed=seed, **special.get(mixer, {}))
        found[f"{mixer} LPT {seed}"] = output = folder / f"{mixer}-LPT-{seed}"
        if not output.exists():
            zoo.export(run, output)
    return found


def trained_on(starts: dict[str, Path], folder: Path, small: bool, jobs: int | None) -> dict[str, Path]:
    """The models after: label → run."""
    last = TINY_AFTER if small else {}
    points = {
        label: [
            str(start / "config.yaml"),
            LONG,
            last,
            {"data": {"tokenizer": str(start / "tokenizer.json")}, "optim": {"initial_weights": str(start)}},
            f"seed_everything={label.split()[-1]}",
        ]
        for label, start in starts.items()
    }
    first = str(next(iter(starts.values())) / "config.yaml")
    outcomes = zoo.sweep({"base": first, "axes": {"start": points}}, folder=folder, jobs=jobs).outcomes
    return {dict(run.cell)["start"]: folder / run.name for run, _ in outcomes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/statex"))
    parser.add_argument("--jobs", type=int, help="runs at a time; by default one for each GPU")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    before = trained(given.folder / "before", given.small, given.jobs)
    after = trained_on(larger(before, given.folder / "larger"), given.folder / "after", given.small, given.jobs)
    names = {f"{mixer} original {seed}": run for (mixer, seed), run in before.items()} | after
    rows = zoo.evaluate(
        [str(run) for run in names.values()],
        "passkey,s_niah_2",
        lengths=[256] if given.small else LENGTHS,
        samples=2 if given.small else 64,
        output=given.folder / "evaluation",
    )
    draw(rows, names, given.folder)


def draw(rows: list[dict[str, Any]], names: dict[str, Path], folder: Path) -> None:
    """Recall over the length, a panel for each mixer and task: a line through the medians, and a dot for each seed."""
    labels = {run.name: label.split() for label, run in names.items()}
    curves: dict[tuple[str, str], dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        mixer, form, _ = labels[row["model"]]
        curve = curves.setdefault((mixer, row["task"]), {}).setdefault(form, {})
        curve.setdefault(row["length"], []).append(row["value"])
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    table = Table("mixer", "task", "model", *map(str, lengths), title="median recall")
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(MIXERS), len(tasks), sharex=True, sharey=True, squeeze=False).flat
    for axes, (mixer, task) in zip(panels, [(mixer, task) for mixer in MIXERS for task in tasks], strict=True):
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
    figure.savefig(folder / "statex.png")
    (folder / "statex.json").write_text(json.dumps(rows, indent=1))
    Console().print(table)
    Console().print(f"{folder}/statex.png", style="dim")


if __name__ == "__main__":
    main()
