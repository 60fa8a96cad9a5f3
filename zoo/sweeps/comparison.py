"""The verb `compare`: train several configs on the same data, and write one table and one picture."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich import box
from rich.console import Console
from rich.table import Table

from kernels import UserError
from zoo.config.find import CONFIGS, find_config
from zoo.config.overlays import Item, is_override, load_config
from zoo.files.atomic import atomic_write
from zoo.files.safe_yaml import dump_yaml
from zoo.runs.command import COMMAND
from zoo.sweeps.plan import Run
from zoo.sweeps.runner import Runner, failed, result
from zoo.train.metrics_file import read_metrics
from zoo.train.results import rank


def whole_configs() -> list[str]:
    """The names of all configs that are not overlays."""
    return sorted(path.name for path in CONFIGS.glob("*.yaml"))


def comparison_table(rows: Iterable[dict[str, Any]]) -> Table:
    """A table of sizes, losses and speed, one row per run, best first."""
    caption = "losses in nats per token; late: in the last eighth of the context"
    table = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("config", "params", "state", "tokens", "loss", "late", "tok/s", "min"):
        table.add_column(column, justify="left" if column == "config" else "right", no_wrap=True)
    rows = sorted(rows, key=lambda row: rank(row["val_loss"]))
    for row in rows:
        table.add_row(
            row["run"],
            f"{row['parameters'] / 1e6:.2f} M",
            f"{row['state_size'] / 1e3:.0f} k",
            f"{row['tokens_seen'] / 1e6:.2f} M",
            "not finite" if row["val_loss"] is None else f"{row['val_loss']:.3f}",
            "" if row["val_loss_by_position"][-1] is None else f"{row['val_loss_by_position'][-1]:.3f}",
            f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "",
            f"{row['wall_seconds'] / 60:.1f}",
        )
    if rows and rows[0]["bigram_loss"] is not None:
        table.add_section()
        table.add_row("bigram model", "", "", "", f"{rows[0]['bigram_loss']:.3f}", "", "", "")
    return table


def comparison_figure(rows: Iterable[dict[str, Any]], folder: Path) -> Figure:
    """A plot of validation loss over tokens for all runs, best first in the legend.

    Args:
        rows: The results rows.
        folder: The folder of the runs.
    """
    rows = sorted(rows, key=lambda row: rank(row["val_loss"]))
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="tokens", ylabel="validation loss (nats per token)")
    styles = ("-", "--", ":")
    for number, row in enumerate(rows):
        metrics = [m for m in read_metrics(folder / row["run"] / "metrics.jsonl") if "val_loss" in m]
        tokens = [m["tokens"] for m in metrics]
        losses = [math.nan if m["val_loss"] is None else m["val_loss"] for m in metrics]
        if not metrics:  # of a run without a logger
            continue
        loss = "not finite" if row["val_loss"] is None else f"{row['val_loss']:.2f}"
        color, style = f"C{number % 10}", styles[number // 10 % 3]
        axes.plot(tokens, losses, color=color, linestyle=style, marker=".", label=f"{row['run']} {loss}")
    if rows and rows[0]["bigram_loss"] is not None:
        axes.axhline(rows[0]["bigram_loss"], color="gray", linewidth=1, label=f"bigram {rows[0]['bigram_loss']:.2f}")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(loc="outside right center", fontsize="small")
    axes.grid(alpha=0.3)
    return figure


class Comparison(NamedTuple):
    """The result of a comparison: the folder of the runs, and the results row of each complete run."""

    folder: Path
    rows: list[dict[str, Any]]


def compare(*configs_and_overrides: Item, folder: str | Path = "runs/compare", jobs: int | None = None) -> Comparison:
    """Train several configs (by default all) on the same data, and print one table.

    A config that names its stack is whole, and is compared. Any other, such as `size/400m.yaml`, is an overlay of all
    that are compared, in any position, as is every `key=value`. Everything is built before the first run starts.
    The table, `comparison.png` and `comparison.json` are of the runs that are complete, even if others failed.

    Args:
        configs_and_overrides: Names or paths of whole configs; and overlays, as files or mappings, and overrides
            `key=value`, which are applied in order to each of them.
        folder: The folder of the runs, with a folder for each config.
        jobs: Number of runs at a time, which share the CPU cores. Null for one per GPU, or one without GPUs.

    Raises:
        UserError: A config is missing or wrong; or runs failed, after all others have completed.
    """
    folder = Path(folder)
    configs, overlays = _sorted_out(configs_and_overrides)
    configs = configs or whole_configs()
    runs = [Run(name, (config, *overlays)) for name, config in zip(_names(configs), configs, strict=True)]
    for run in runs:  # reports mistakes before any run starts
        run.check()
    failures = Runner(COMMAND, folder, jobs).run(runs)
    rows = [row for run in runs if (row := result(folder / run.name))]
    if rows:
        with atomic_write(folder / "comparison.png") as file:
            comparison_figure(rows, folder).savefig(file, format="png")
        with atomic_write(folder / "comparison.json") as file:
            file.write(json.dumps(rows, indent=1).encode())
        Console().print(comparison_table(rows))
        Console().print(f"{folder}/comparison.json · {folder}/comparison.png", style="dim", soft_wrap=True)
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


def _names(configs: Sequence[str]) -> list[str]:
    """A name of each config: that of its file, or of the run whose `config.yaml` it is.

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
