"""The verb `sweep`: run all combinations of a sweep's axes, and write one table, CSV and picture."""

import dataclasses
import sys
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
    """The results of a sweep.

    Attributes:
        folder: The folder of the runs, with `sweep.csv` and `sweep.png`.
        outcomes: Each run with its results row, which is None if the run is not complete.
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
        configs_and_overrides: The sweep, such as `sweep/heads.yaml`; overrides `key=value` of the sweep's keys, such as
            `seeds=[0,1]`; and overrides for all of its runs.
        folder: The folder of the runs; null for the sweep's `runs_in`, or else `runs/NAME` after the sweep's name.
        jobs: Number of runs at a time; null for one per GPU, or one without GPUs.
        dry_run: Only list the runs with their sizes.
        cluster: Submit the runs to a cluster, through submitit: slurm. Null runs them on this machine.
        cluster_options: Options of submitit, such as `{slurm_partition: gpu}`.

    Raises:
        UserError: The sweep or one of its configs is wrong; or runs failed, after all others have completed.
    """
    if cluster is None and cluster_options:
        raise UserError(f"cluster_options: {cluster_options} are for a cluster, and none is named; add --cluster=slurm")
    if cluster is not None and jobs is not None:
        raise UserError(f"jobs: {jobs} runs at a time on this machine, but cluster is {cluster}, which queues all runs")
    items = load_items(configs_and_overrides)
    settings = [item for item in items if not isinstance(item, str) or item.partition("=")[0].split(".")[0] in FIELDS]
    overrides = tuple(item for item in items if isinstance(item, str) and item not in settings)
    if not any(not isinstance(item, str) or item.startswith("base=") for item in settings):
        raise UserError("sweep: missing; give --config sweep/heads.yaml, or a file of your own (tutorial 06)")
    plan = _plan(settings)
    target = Path(folder or plan.runs_in or Path("runs") / (first_name(configs_and_overrides) or "sweep"))
    runs = plan.runs(overrides)
    console = Console(width=None if sys.stdout.isatty() else 2 * report.WIDE)  # a file has no width
    if dry_run:
        console.print(report.preview(runs, target))
        return SweepResult(target, [report.Outcome(run, None) for run in runs])
    runner = Runner(COMMAND, target, jobs)
    failures = runner.run(runs) if cluster is None else run_on_cluster(runner, runs, cluster, cluster_options or {})
    outcomes = report.outcomes(runs, target)
    console.print(report.write(plan, outcomes, target, console.width))
    if problems := [problem for _, problem in report.failures(plan, outcomes)]:
        listed, more = "; ".join(problems[:5]), f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        many = "1 run fails" if len(problems) == 1 else f"{len(problems)} runs fail"
        console.print(f"{many} a gate, so read the rest with care: {listed}{more}", style="yellow")
    if failures:
        raise failed(failures, len(runs))
    console.print(f"{target}/sweep.csv · {target}/sweep.png", style="dim")
    return SweepResult(target, outcomes)


def _plan(items: list[str | dict[str, Any]]) -> Sweep:
    parser = Parser()
    parser.add_argument("-c", "--config", action=ConfigFile)
    parser.add_class_arguments(Sweep)
    with explained(parser):
        values = parser.instantiate(parser.parse_args([*as_arguments(items)]))
    return Sweep(**{name: values[name] for name in FIELDS})
