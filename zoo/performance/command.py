"""The verb `bench`: run a benchmark, print a table, and write the results."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from kernels import UserError
from mixers import did_you_mean
from zoo.arguments import check_names
from zoo.config import KEYS
from zoo.config.command_line import Keys, arguments_of
from zoo.config.overlays import Item
from zoo.performance.bench_report import Report, show
from zoo.performance.decoding import bench_decode
from zoo.performance.kernels import bench_kernels
from zoo.performance.training import bench_training

KINDS: dict[str, Callable[..., Report]] = {
    "kernels": bench_kernels,
    "training": bench_training,
    "decode": bench_decode,
}


def bench(kind: str, *configs_and_overrides: Item, **options: Any) -> Report:
    """Run a benchmark, print a table, and write `bench.json`.

    Args:
        kind: The benchmark: `kernels`, `training` or `decode`.
        configs_and_overrides: The model; none for `kernels`.
        options: The arguments of `bench_kernels`, `bench_training` and so on; unknown ones are errors.

    Returns:
        The report; `report.failed` says whether a result was wrong.

    Raises:
        UserError: An argument is invalid.
    """
    check_names("bench", [kind], KINDS)
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
    return show(benchmark(**options))


HELP = """\
usage: python cli.py bench kernels|training|decode …

  kernels    forward and backward times of the ops:
             python cli.py bench kernels --ops=delta_rule,window_attention
  training   tokens per second in training, and where the time of a step goes:
             python cli.py bench training --config gla.yaml --config size/400m.yaml --length=4096
  decode     time of the next token, at a batch size and a position:
             python cli.py bench decode --config gla.yaml --batch_sizes=[1,64] --positions=[1024]

python cli.py bench KIND --help lists the options of each.
"""


def run_bench(arguments: list[str]) -> int:
    """Run the benchmark named by the first argument; returns 1 if a result was wrong.

    Raises:
        UserError: The name, an option or a value is wrong.
    """
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help"):
        sys.stdout.write(HELP)
        return 0
    if name not in KINDS:
        bench(name)  # raises an error that lists the benchmarks
    # without help: some benchmarks have options of the same names
    keys = None if name == "kernels" else Keys(KEYS, lambda parser: None)
    items, options = arguments_of(KINDS[name], rest, f"bench {name}", keys)
    return int(bench(name, *items, **options).failed)
