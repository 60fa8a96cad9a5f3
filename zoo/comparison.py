"""Many configs trained on the same data, and one table and one picture of them."""

import json
import os
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich import box
from rich.table import Table
from tqdm import tqdm

from kernels import UserError

from .atomic import atomic_write
from .config import CONFIGS, find_config, read
from .curves import read_metrics


def train_all(
    command: Sequence[str], configs: Sequence[str], overrides: Sequence[str], folder: Path, jobs: int = 1
) -> list[dict[str, Any]]:
    """Train each config in a process of its own, `jobs` at a time; finished runs are kept, stopped ones continued.

    Args:
        command: How to start the command line, such as `["python", "cli.py"]`.
        configs: Names or paths of whole configs.
        overrides: `--key=value` arguments for all of them.
        folder: Where the runs go, one folder for each config.
        jobs: Runs at a time; they share the processor's cores.

    Returns:
        The result rows, in the order of the configs.

    Raises:
        UserError: A config is missing or wrong, or runs failed; the others are complete by then.
    """
    if jobs < 1:
        raise UserError(f"jobs: {jobs} must be at least 1")
    for config in configs:  # a mistake should not wait for its turn
        read(config, *(override.removeprefix("--") for override in overrides))
    threads = max((os.cpu_count() or 1) // jobs, 1)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment.pop("ZOO_RUN", None)

    def train(config: str) -> str | None:
        run = folder / find_config(config).stem
        if _result(run):
            return None
        started = (run / "checkpoints" / "last.ckpt").is_file()
        source = ["--resume", str(run)] if started else ["--config", config, "--run", f"{folder}/{run.name}"]
        log = folder / f"{run.name}.log"
        with log.open("a", encoding="utf-8") as output:
            done = subprocess.run([*command, "fit", *source, *overrides], stdout=output, stderr=output, env=environment)
        return None if done.returncode == 0 else f"{config} (exit code {done.returncode}, see {log})"

    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        failures = list(tqdm(pool.map(train, configs), total=len(configs), desc="runs", unit=" runs"))
    if failed := [failure for failure in failures if failure]:
        raise UserError(f"compare: {len(failed)} of {len(configs)} runs failed: {'; '.join(failed)}")
    return [row for config in configs if (row := _result(folder / find_config(config).stem))]


def whole_configs() -> list[str]:
    """The names of all configs that are no overlays."""
    return sorted(path.name for path in CONFIGS.glob("*.yaml"))


def _result(run: Path) -> dict[str, Any] | None:
    file = run / "results.json"
    if not file.is_file():
        return None
    row = json.loads(file.read_text(encoding="utf-8"))
    return row if row["status"] == "complete" else None


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
            f"{row['val_loss_by_position'][-1]:.3f}",
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


def compare(command: Sequence[str], configs: Sequence[str], overrides: Sequence[str], folder: Path, jobs: int) -> Table:
    """`train_all`, then `comparison.png` and `comparison.json` in `folder`; returns the table. No configs means all."""
    rows = train_all(command, configs or whole_configs(), overrides, folder, jobs)
    with atomic_write(folder / "comparison.png") as file:
        comparison_figure(rows, folder).savefig(file, format="png")
    with atomic_write(folder / "comparison.json") as file:
        file.write(json.dumps(rows, indent=1).encode())
    return comparison_table(rows)
