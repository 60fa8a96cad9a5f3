"""The verb `bench`: run a benchmark, print a table, and write the results."""

import inspect
from collections.abc import Callable
from typing import Any

from rich.console import Console

from kernels import UserError
from mixers import did_you_mean
from zoo.benchmarks.decode import bench_decode
from zoo.benchmarks.expansion import bench_expansion
from zoo.benchmarks.kernel import bench_kernels
from zoo.benchmarks.length import bench_length
from zoo.benchmarks.report import Report
from zoo.benchmarks.scaling import bench_scaling
from zoo.benchmarks.training import bench_training
from zoo.config.overlays import Item

KINDS: dict[str, Callable[..., Report]] = {
    "kernels": bench_kernels,
    "training": bench_training,
    "decode": bench_decode,
    "scaling": bench_scaling,
    "expansion": bench_expansion,
    "length": bench_length,
}


def bench(kind: str, *configs_and_overrides: Item, **options: Any) -> Report:
    """Run a benchmark, print a table, and write `bench.json`.

    Args:
        kind: The benchmark: `kernels`, `training`, `decode`, `scaling`, `expansion` or `length`.
        configs_and_overrides: The model; none for `kernels`, and optional for `expansion` and `length`.
        options: The arguments of `bench_kernels`, `bench_training` and so on; unknown ones are errors.

    Returns:
        The report; `report.failed` says whether a result was wrong.

    Raises:
        UserError: An argument is invalid.
    """
    if kind not in KINDS:
        raise UserError(f"bench: {kind!r} is not one of {', '.join(KINDS)}{did_you_mean(kind, list(KINDS))}")
    benchmark = KINDS[kind]
    allowed = [name for name in inspect.signature(benchmark).parameters if name != "config"]
    if wrong := next((name for name in options if name not in allowed), None):
        raise UserError(
            f"bench: {wrong!r} is not an option of {kind}{did_you_mean(wrong, allowed)} ({', '.join(allowed)})"
        )
    if benchmark is not bench_kernels:
        options["config"] = list(configs_and_overrides)
    elif configs_and_overrides:
        raise UserError(f"bench: kernels has no config, and {configs_and_overrides[0]!r} is not one of its options")
    report = benchmark(**options)
    report.write()
    console = Console()
    if not console.is_terminal:  # in a log file, wide enough for all columns
        console = Console(width=max(console.width, 160))
    console.print(report.table())
    console.out(f"written to {report.folder}", highlight=False)
    return report
