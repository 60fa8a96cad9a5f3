"""Many configs trained on the same data, and one table and one picture of them."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich import box
from rich.table import Table

from .atomic import atomic_write
from .config import CONFIGS, find_config
from .curves import read_metrics
from .sweep import Run, Runner, failed, result


def whole_configs() -> list[str]:
    """The names of all configs that are no overlays."""
    return sorted(path.name for path in CONFIGS.glob("*.yaml"))


def comparison_table(rows: Iterable[dict[str, Any]]) -> Table:
    """One row for each run, the best first: sizes, losses, speed."""
    caption = "losses in nats a token; late: in the last eighth of the context"
    table = Table(caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("config", "params", "state", "tokens", "loss", "late", "tok/s", "min"):
        table.add_column(column, justify="left" if column == "config" else "right", no_wrap=True)
    rows = sorted(rows, key=lambda row: row["val_loss"])
    for row in rows:
        table.add_row(
            row["run"],
            f"{row['parameters'] / 1e6:.2f} M",
            f"{row['state_size'] / 1e3:.0f} k",
            f"{row['tokens_seen'] / 1e6:.2f} M",
            f"{row['val_loss']:.3f}",
            "" if row["val_loss_by_position"][-1] is None else f"{row['val_loss_by_position'][-1]:.3f}",
            f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "",
            f"{row['wall_seconds'] / 60:.1f}",
        )
    if rows and rows[0]["bigram_loss"] is not None:
        table.add_section()
        table.add_row("bigram model", "", "", "", f"{rows[0]['bigram_loss']:.3f}", "", "", "")
    return table


def comparison_figure(rows: Iterable[dict[str, Any]], folder: Path) -> Figure:
    """The validation losses of all runs over the tokens, the best first in the legend."""
    rows = sorted(rows, key=lambda row: row["val_loss"])
    figure = Figure(figsize=(9, 5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="tokens", ylabel="validation loss (nats per token)")
    styles = ("-", "--", ":")
    for number, row in enumerate(rows):
        metrics = [m for m in read_metrics(folder / row["run"] / "metrics.jsonl") if "val_loss" in m]
        tokens, losses = [m["tokens"] for m in metrics], [m["val_loss"] for m in metrics]
        color, style = f"C{number % 10}", styles[number // 10 % 3]
        axes.plot(tokens, losses, color=color, linestyle=style, marker=".", label=f"{row['run']} {row['val_loss']:.2f}")
    if rows and rows[0]["bigram_loss"] is not None:
        axes.axhline(rows[0]["bigram_loss"], color="gray", linewidth=1, label=f"bigram {rows[0]['bigram_loss']:.2f}")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    figure.legend(loc="outside right center", fontsize="small")
    axes.grid(alpha=0.3)
    return figure


def compare(
    command: Sequence[str], configs: Sequence[str], overrides: Sequence[str], folder: Path, jobs: int | None
) -> Table:
    """Train each config, each with its run in `folder`; returns the table. No configs means all.

    It writes `comparison.png` and `comparison.json`, also when some runs failed.

    Args:
        command: How to start the command line, such as `["python", "cli.py"]`.
        configs: Names or paths of whole configs.
        overrides: `--key=value` arguments for all of them.
        folder: Where the runs go, one folder for each config.
        jobs: Runs at a time; they share the processor's cores. Null for one on each GPU.

    Raises:
        UserError: A config is missing or wrong, or runs failed; the others are complete by then.
    """
    shared = tuple(override.removeprefix("--") for override in overrides)
    runs = [Run(find_config(config).stem, (config, *shared)) for config in configs or whole_configs()]
    for run in runs:  # a mistake should not wait for its turn
        run.read()
    failures = Runner(command, folder, jobs).run(runs)
    rows = [row for run in runs if (row := result(folder / run.name))]
    if rows:
        with atomic_write(folder / "comparison.png") as file:
            comparison_figure(rows, folder).savefig(file, format="png")
        with atomic_write(folder / "comparison.json") as file:
            file.write(json.dumps(rows, indent=1).encode())
    if failures:
        raise failed(failures, len(runs))
    return comparison_table(rows)
