"""Train small models with states of equal size on associative recall, and compare recall with what `inspect` measures.

    PYTHONPATH=. python reproductions/inspection.py

A CPU miniature: five mixers, three seeds and two learning rates; two layers of width 64, each with four states of
16 × 16; 4 and 8 key-value pairs in training and 16 in evaluation. It adds a row to
reproductions/measured/inspection_cpu.csv after each run, skips runs that have one, and prints rank correlations with
bootstrap intervals over seeds.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.table import Table
from torchmetrics.functional import spearman_corrcoef

import zoo
from kernels import UserError
from reproductions.write_csv import read, write
from zoo.config.command_line import arguments_of
from zoo.data.synthetic.recall import Recall, RecallTask
from zoo.display import new_console, new_table
from zoo.lm.model import LanguageModel

MEASURED = Path(__file__).parent / "measured" / "inspection_cpu.csv"
CONV: dict[str, Any] = {"conv": 4, "activation": "silu"}
SLOW = {"class_path": "Discretisation", "init_args": {"high": 1.0}}
MIXERS: dict[str, dict[str, Any]] = {
    "DeltaNet": {"head_dim": 16},
    "GatedDeltaNet": {"head_dim": 16, "value_dim": 16, "decay": SLOW},
    "GLA": {"expand_k": 1.0, "qk": CONV, "v": CONV},
    "Mamba2": {"expand": 1, "head_dim": 16, "state_dim": 16, "num_groups": 4, "decay": SLOW},
    "TNL": {"qk": CONV},
}
VOCAB, PAIRS, PROMPTS = 64, 16, 8
DRAWS = 1000  # of the bootstrap


def train(mixer: str, rate: float, seed: int, steps: int) -> zoo.Result:
    """Train one model."""
    model = {"class_path": mixer, "init_args": MIXERS[mixer]}
    tasks = [{"length": 32, "pairs": 4}, {"length": 32, "pairs": 8}]
    overrides = {
        "model": {
            **{"hidden_size": 64, "num_heads": 4},
            "stack": {"init_args": {"mixer": {"class_path": "Expanded", "init_args": {"factor": 1, "mixer": model}}}},
        },
        "data": {
            **{"vocab_size": VOCAB, "tasks": tasks, "batch_size": 32, "validation_samples": 200},
            "validation_tasks": [*tasks, {"length": 64, "pairs": PAIRS}],
        },
        "optim": {"learning_rate": rate},
        "seed_everything": seed,
        "samples": {"prompts": []},
        "trainer": {
            **{"max_steps": steps, "val_check_interval": steps, "callbacks": [], "accelerator": "cpu"},
            "enable_progress_bar": False,
        },
    }
    return zoo.fit("recall/mqar.yaml", overrides, run=f"runs/inspection/{mixer}-{rate}-{seed}", overwrite=True)


def measure(model: LanguageModel) -> dict[str, Any]:
    """Return the numbers of each layer: effective rank after the last pair, margin, and share of values read."""
    samples = Recall(RecallTask(4 * PAIRS, PAIRS), PROMPTS, VOCAB, True, 0.01, "inspection")
    numbers: dict[str, Any] = {}
    ranks: dict[int, list[float]] = {}
    for prompt in samples.batch(range(PROMPTS)).tokens:
        for number, layer in zoo.inspect(model, prompt, verbose=False).layers.items():
            ranks.setdefault(number, []).append(float(layer.spectra(2 * PAIRS).effective_ranks[0].mean()))
    [row] = zoo.inspect(model, pairs=[PAIRS], verbose=False).recall
    for layer in row["layers"]:
        n = layer["layer"]
        numbers[f"rank_{n}"] = fmean(ranks[n])
        numbers |= {f"{key}_{n}": layer[key] for key in ("head", "delay", "margin", "read")}
    return numbers


def numbers_of(row: dict[str, str]) -> dict[str, float]:
    """Return the accuracy of a run and the numbers to compare it with; the reading layer reads more values."""
    reading = max((0, 1), key=lambda n: float(row[f"read_{n}"]))
    numbers = {"rank of the reading layer": f"rank_{reading}", "rank of layer 0": "rank_0", "rank of layer 1": "rank_1"}
    numbers |= {"its median margin": f"margin_{reading}", "values that it reads": f"read_{reading}"}
    numbers |= {"accuracy": f"accuracy_{PAIRS}"}
    return {name: float(row[key]) for name, key in numbers.items()}


def overall(rows: Sequence[dict[str, str]], x: str) -> float:
    """Return Spearman's correlation with the accuracy over all runs."""
    numbers = [numbers_of(row) for row in rows]
    return float(spearman_corrcoef(*(torch.tensor([row[name] for row in numbers]) for name in (x, "accuracy"))))


def within(rows: Sequence[dict[str, str]], x: str) -> float:
    """Return the mean over mixers of the correlation among the runs of a mixer."""
    return fmean(overall([row for row in rows if row["mixer"] == mixer], x) for mixer in MIXERS)


def learned(rows: Sequence[dict[str, str]], x: str) -> float:
    """Return the correlation over the runs that answer 95 % of the questions at 4 pairs."""
    return overall([row for row in rows if float(row["accuracy_4"]) >= 0.95], x)


STATISTICS: dict[str, Callable[[Sequence[dict[str, str]], str], float]] = {
    "all runs": overall,
    "within mixers": within,
    "runs that learned 4 pairs": learned,
}


def interval(statistic: str, rows: list[dict[str, str]], x: str) -> str:
    """Return a statistic, with its 95 % interval if the seeds of each mixer and learning rate are drawn again."""
    cells: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows:
        cells.setdefault((row["mixer"], row["learning_rate"]), []).append(row)
    torch.manual_seed(0)
    draws = []
    for _ in range(DRAWS):
        drawn = [cell[i] for cell in cells.values() for i in torch.randint(len(cell), (len(cell),)).tolist()]
        draws.append(STATISTICS[statistic](drawn, x))
    low, high = torch.tensor(draws).nanquantile(torch.tensor([0.025, 0.975])).tolist()
    return f"{STATISTICS[statistic](rows, x):+.2f} [{low:+.2f}, {high:+.2f}]"


def report(rows: list[dict[str, str]]) -> Table:
    """Return the correlations with the accuracy at 16 pairs."""
    title = f"Spearman's correlation with accuracy at {PAIRS} pairs, {len(rows)} runs"
    table = new_table(["number", *STATISTICS], left=1, title=title)
    for x in list(numbers_of(rows[0]))[:-1]:
        table.add_row(x, *(interval(statistic, rows, x) for statistic in STATISTICS))
    return table


def inspection(
    seeds: list[int] | None = None, rates: list[float] | None = None, steps: int = 600, output: str = str(MEASURED)
) -> Table:
    """Train what the table lacks, and return the correlations.

    Args:
        seeds: Seeds; null for 0, 1, 2.
        rates: Learning rates; null for 3e-3 and 1e-2.
        steps: Number of training steps.
        output: The CSV.
    """
    rows: list[dict[str, Any]] = [*read(Path(output))]
    done = {(row["mixer"], float(row["learning_rate"]), int(row["seed"])) for row in rows}
    for seed, rate, mixer in itertools.product(seeds or [0, 1, 2], rates or [3e-3, 1e-2], MIXERS):
        if (mixer, rate, seed) in done:
            continue
        result = train(mixer, rate, seed, steps)
        by_task = result.row["val_accuracy_by_task"]
        row = {"mixer": mixer, "learning_rate": rate, "seed": seed, "steps": steps}
        row |= {key: result.row[key] for key in ("parameters", "state_size", "torch")}
        row |= {f"accuracy_{n}": by_task[f"pairs_{n}"] for n in (4, 8, PAIRS)}
        rows = [*read(Path(output)), row | measure(result.model)]
        write(rows, Path(output))
    return report(read(Path(output)))


def main(arguments: list[str]) -> None:
    """Run the command line."""
    new_console().print(inspection(**arguments_of(inspection, arguments, "inspection")[1]))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
