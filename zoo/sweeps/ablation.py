"""An ablation from Python or the command line: all combinations of a sweep's axes, one table, CSV and picture."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from kernels import UserError
from zoo.config import ConfigFile, Parser, explained
from zoo.config.overlays import Item, as_arguments, first_name, load_items
from zoo.runs.command import COMMAND
from zoo.sweeps import report
from zoo.sweeps.cluster import run_on_cluster
from zoo.sweeps.plan import Sweep
from zoo.sweeps.runner import Runner, failed

FIELDS = tuple(field.name for field in dataclasses.fields(Sweep))


class SweepResult(NamedTuple):
    """What a sweep left.

    Attributes:
        folder: Where the runs are, with `sweep.csv` and `sweep.png`.
        outcomes: Each run with its results row; None where it was not run.
    """

    folder: Path
    outcomes: list[report.Outcome]


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
        configs_and_overrides: The sweep, such as `sweep/heads.yaml`; overrides `key=value` of its own keys, such as
            `seeds=[0,1]`; and overrides for all of its runs.
        folder: Where the runs go; null for `runs/NAME` of the sweep.
        jobs: Runs at a time; null for one on each GPU, or one.
        dry_run: List the runs with their sizes, and stop.
        cluster: Hand the runs to a cluster, through submitit: slurm. Null runs them here.
        cluster_options: submitit's, such as `{slurm_partition: gpu}`.

    Raises:
        UserError: The sweep or one of its configs is wrong, or runs failed; the others are complete by then.
    """
    items = load_items(configs_and_overrides)
    own = [item for item in items if not isinstance(item, str) or item.partition("=")[0].split(".")[0] in FIELDS]
    shared = tuple(item for item in items if isinstance(item, str) and item not in own)
    if not any(not isinstance(item, str) or item.startswith("base=") for item in own):
        raise UserError("sweep: which one? --config sweep/heads.yaml, or a file of your own (tutorial 06)")
    plan = _plan(own)
    where = Path("runs") / (first_name(configs_and_overrides) or "sweep") if folder is None else Path(folder)
    runs, console = plan.runs(shared), Console()
    if dry_run:
        console.print(report.preview(runs, where))
        return SweepResult(where, [report.Outcome(run, None) for run in runs])
    runner = Runner(COMMAND, where, jobs)
    failures = runner.run(runs) if cluster is None else run_on_cluster(runner, runs, cluster, cluster_options or {})
    outcomes = report.outcomes(runs, where)
    console.print(report.write(plan, outcomes, where))
    if failures:
        raise failed(failures, len(runs))
    console.print(f"{where}/sweep.csv · {where}/sweep.png", style="dim")
    return SweepResult(where, outcomes)


def _plan(items: list[str | dict[str, Any]]) -> Sweep:
    parser = Parser()
    parser.add_argument("-c", "--config", action=ConfigFile)
    parser.add_class_arguments(Sweep)
    with explained(parser):
        values = parser.instantiate(parser.parse_args([*as_arguments(items)]))
    return Sweep(**{name: values[name] for name in FIELDS})
