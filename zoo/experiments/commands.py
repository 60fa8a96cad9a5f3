"""The verbs `sweep` and `compare`: train several models, and write one table and one picture."""

import dataclasses
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich.console import Console
from rich.table import Table

from kernels import UserError
from zoo.config.find import find_config
from zoo.config.merge import merged
from zoo.config.overlays import Item, first_name, is_override, load_config, load_items
from zoo.config.resolve import built_arguments, resolved
from zoo.config.signatures import parameters
from zoo.display import as_html, new_figure, new_table, short_list, write_figure
from zoo.experiments import results
from zoo.experiments.cluster import run_on_cluster
from zoo.experiments.definition import Run, Sweep
from zoo.experiments.runner import COMMAND, Runner, failed, result
from zoo.files.atomic import atomic_write
from zoo.files.safe_yaml import dump_yaml
from zoo.train.metrics_file import read_metrics
from zoo.train.results import BITS, rank, vocabularies_differ

FIELDS = tuple(field.name for field in dataclasses.fields(Sweep))
TABLE, PICTURE = "comparison.json", "comparison.png"


class SweepResult(NamedTuple):
    """The results of a sweep.

    Attributes:
        folder: The folder of the runs, with `sweep.csv` and `sweep.png`.
        outcomes: Each run with its results row, which is None if the run is not complete.
    """

    folder: Path
    outcomes: list[results.Outcome]

    def _repr_html_(self) -> str:
        """The picture of the sweep, for notebooks, where its table was printed."""
        return as_html(None, self.folder / "sweep.png")


def sweep(
    *configs_and_overrides: Item,
    folder: str | Path | None = None,
    jobs: int | None = None,
    dry_run: bool = False,
    cluster: str | None = None,
    cluster_options: dict[str, Any] | None = None,
) -> SweepResult:
    """Run all combinations of a sweep's axes, and print one table.

    Args:
        configs_and_overrides: The sweep, such as `sweep/heads.yaml`; overrides `key=value` of the sweep's keys, such as
            `seeds=[0,1]`; and overrides for all of its runs.
        folder: The folder of the runs; null for the sweep's `runs_in`, or else `runs/NAME` after the sweep's name.
        jobs: Number of runs at a time; null for one per GPU, or one without GPUs.
        dry_run: Only list the runs with their sizes.
        cluster: Submit the runs to a cluster, through submitit: slurm. Null runs them on this machine.
        cluster_options: Options of submitit, such as `{slurm_partition: gpu}`.

    Raises:
        UserError: The sweep or one of its configs is wrong, or its folder has other files of the same names; or runs
            failed, after all others have completed.
    """
    if cluster is None and cluster_options:
        raise UserError(f"cluster_options: {cluster_options} are for a cluster, and none is named; add --cluster=slurm")
    if cluster is not None and jobs is not None:
        raise UserError(f"jobs: {jobs} is about runs on this machine, but cluster is {cluster}, which queues all runs")
    items = load_items(configs_and_overrides)
    settings = [item for item in items if not isinstance(item, str) or item.partition("=")[0].split(".")[0] in FIELDS]
    overrides = tuple(item for item in items if isinstance(item, str) and item not in settings)
    if not any(not isinstance(item, str) or item.startswith("base=") for item in settings):
        raise UserError("sweep: missing; give --config sweep/heads.yaml, or a file of your own (tutorial 06)")
    plan = read_sweep(settings)
    target = Path(folder or plan.runs_in or Path("runs") / (first_name(configs_and_overrides) or "sweep"))
    runs = plan.runs(overrides)
    console = Console(width=None if sys.stdout.isatty() else 2 * results.WIDE)  # a file has no width
    if dry_run:
        console.print(results.preview(runs, target))
        return SweepResult(target, [results.Outcome(run, None) for run in runs])
    Runner(COMMAND, target).check_results(runs, results.FILES)
    runner = Runner(COMMAND, target, jobs)
    failures = runner.run(runs) if cluster is None else run_on_cluster(runner, runs, cluster, cluster_options or {})
    outcomes = results.outcomes(runs, target)
    console.print(results.write(plan, outcomes, target, console.width))
    if problems := [problem for _, problem in results.failures(plan, outcomes)]:
        many = "1 run fails" if len(problems) == 1 else f"{len(problems)} runs fail"
        console.print(f"{many} a gate, so read the rest with care: {short_list(problems)}", style="yellow")
    if failures:
        raise failed(failures, len(runs))
    console.print(f"{target}/sweep.csv · {target}/sweep.png", style="dim")
    return SweepResult(target, outcomes)


def read_sweep(items: Sequence[str | Mapping[str, Any]]) -> Sweep:
    """Return the sweep that configs and overrides of its keys describe.

    Raises:
        UserError: A key or value is wrong, or the base is missing.
    """
    return Sweep(**built_arguments(Sweep, resolved(merged(items), parameters(Sweep))))


def comparison_table(rows: Iterable[dict[str, Any]]) -> Table:
    """A table of sizes, losses and speed, one row per run, best first: by bits per byte if vocabularies differ."""
    rows, metric = _best_first(rows)
    captions = ["losses in nats per token; late: in the last eighth of the context"]
    if metric != "val_loss":
        captions.append("the vocabularies differ: sorted by bits per byte, nats per token cannot be compared")
    without = [row["run"] for row in rows if row.get(BITS) is None]
    if metric != "val_loss" and without:
        captions.append(f"no bits per byte for lack of a tokenizer that counts them: {short_list(without)}")
    bits = ["bits/byte"] if len(without) < len(rows) else []
    columns = ["config", "params", "state", "tokens", "loss", *bits, "late", "tok/s", "min"]
    table = new_table(columns, wrapped=("config",), caption="\n".join(captions))
    for row in rows:
        table.add_row(
            row["run"],
            f"{row['parameters'] / 1e6:.2f} M",
            f"{row['state_size'] / 1e3:.0f} k",
            f"{row['tokens_seen'] / 1e6:.2f} M",
            "not finite" if row["val_loss"] is None else f"{row['val_loss']:.3f}",
            *["" if row.get(BITS) is None else f"{row[BITS]:.3f}" for _ in bits],
            "" if row["val_loss_by_position"][-1] is None else f"{row['val_loss_by_position'][-1]:.3f}",
            f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "",
            f"{row['wall_seconds'] / 60:.1f}",
        )
    if metric == "val_loss" and rows and rows[0]["bigram_loss"] is not None:
        table.add_section()
        table.add_row("bigram model", "", "", "", f"{rows[0]['bigram_loss']:.3f}")
    return table


def _best_first(rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The rows, best first, and the metric that they are compared by."""
    rows = list(rows)
    metric = BITS if vocabularies_differ(rows) else "val_loss"
    return sorted(rows, key=lambda row: rank(row.get(metric))), metric


def comparison_figure(rows: Iterable[dict[str, Any]], folder: Path) -> Figure:
    """A plot of validation loss over tokens for all runs in a folder, best first in the legend."""
    rows, metric = _best_first(rows)
    figure = new_figure(9, 5)
    unit = "nats per token" if metric == "val_loss" else "bits per byte"
    axes = figure.add_subplot(xlabel="tokens", ylabel=f"validation loss ({unit})")
    styles = ("-", "--", ":")
    for number, row in enumerate(rows):
        metrics = [m for m in read_metrics(folder / row["run"] / "metrics.jsonl") if metric in m]
        tokens = [m["tokens"] for m in metrics]
        losses = [math.nan if m[metric] is None else m[metric] for m in metrics]
        if not metrics:  # of a run without a logger
            continue
        loss = "not finite" if row[metric] is None else f"{row[metric]:.2f}"
        color, style = f"C{number % 10}", styles[number // 10 % 3]
        axes.plot(tokens, losses, color=color, linestyle=style, marker=".", label=f"{row['run']} {loss}")
    if metric == "val_loss" and rows and rows[0]["bigram_loss"] is not None:
        axes.axhline(rows[0]["bigram_loss"], color="gray", linewidth=1, label=f"bigram {rows[0]['bigram_loss']:.2f}")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(loc="outside right center", fontsize="small")
    axes.grid(alpha=0.3)
    return figure


class Comparison(NamedTuple):
    """The result of a comparison: the folder of the runs, and the results row of each complete run."""

    folder: Path
    rows: list[dict[str, Any]]

    def _repr_html_(self) -> str:
        """The table and the picture of the comparison, for notebooks."""
        return as_html(comparison_table(self.rows), self.folder / PICTURE)


def compare(*configs_and_overrides: Item, folder: str | Path = "runs/compare", jobs: int | None = None) -> Comparison:
    """Train several configs on the same data, and print one table.

    A config that names its stack is whole, and is compared. Any other, such as `size/400m.yaml`, is an overlay of all
    that are compared, in any position, as is every `key=value`. Everything is built before the first run starts.
    The table, `comparison.png` and `comparison.json` are of the runs that are complete, even if others failed.

    Args:
        configs_and_overrides: Names or paths of whole configs; and overlays, as files or mappings, and overrides
            `key=value`, which are applied in order to each of them.
        folder: The folder of the runs, with a folder for each config.
        jobs: Number of runs at a time, which share the CPU cores. Null for one per GPU, or one without GPUs.

    Raises:
        UserError: A config is missing or wrong, or the folder has other files of the same names; or runs failed, after
            all others have completed.
    """
    folder = Path(folder)
    configs, overlays = _sorted_out(configs_and_overrides)
    if not configs:
        raise UserError("compare: missing; name the configs to compare, such as gdn_h2.yaml gla.yaml")
    runs = [Run(name, (config, *overlays)) for name, config in zip(config_names(configs), configs, strict=True)]
    runs = [run._replace(parsed=run.check()) for run in runs]  # reports mistakes before any run starts
    runner = Runner(COMMAND, folder, jobs)
    runner.check_results(runs, (TABLE, PICTURE))
    failures = runner.run(runs)
    rows = [row for run in runs if (row := result(folder / run.name))]
    if rows:
        write_figure(comparison_figure(rows, folder), folder / PICTURE)
        with atomic_write(folder / TABLE) as file:
            file.write(json.dumps(rows, indent=1).encode())
        Console().print(comparison_table(rows))
        Console().print(f"{folder}/{TABLE} · {folder}/{PICTURE}", style="dim", soft_wrap=True)
    if failures:
        raise failed(failures, len(runs))
    return Comparison(folder, rows)


def _sorted_out(items: Iterable[Item]) -> tuple[list[str], list[str]]:
    """The whole configs to compare; and the overlays and overrides for all of them, in order."""
    configs, overlays = list[str](), list[str]()
    for item in items:
        if isinstance(item, str) and is_override(item):
            overlays.append(item)
            continue
        model = (contents := load_config(item)).get("model")
        stack = model.get("stack") if isinstance(model, dict) else None
        inline = isinstance(item, Mapping) or str(item).startswith("{")
        if not inline and (isinstance(stack, str) or (isinstance(stack, dict) and "class_path" in stack)):
            configs.append(str(item))
        else:
            overlays.append(dump_yaml(contents, one_line=True))
    return configs, overlays


def config_names(configs: Sequence[str]) -> list[str]:
    """Return a name for each config: that of its file, or of the run whose `config.yaml` it is.

    Raises:
        UserError: Two have the same name.
    """
    files = [find_config(config) for config in configs]
    names = [file.absolute().parent.name if file.name == "config.yaml" else file.stem for file in files]
    for name, count in Counter(names).items():
        if count > 1:
            both = " and ".join(config for config, each in zip(configs, names, strict=True) if each == name)
            raise UserError(f"config: {both} have the same name, {name}; copy one to a file of another name")
    return names
