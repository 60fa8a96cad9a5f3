"""Benchmarks: of the ops (`kernels`), of training steps (`training`), of generation (`decode`), and of several devices
(`scaling`)."""

from collections.abc import Callable
from typing import Any

from rich.console import Console

from kernels import UserError
from mixers import did_you_mean

from .. import config as configs
from .decode import bench_decode
from .kernel import bench_kernels
from .report import Report
from .scaling import bench_scaling
from .training import bench_training

KINDS: dict[str, Callable[..., Report]] = {
    "kernels": bench_kernels,
    "training": bench_training,
    "decode": bench_decode,
    "scaling": bench_scaling,
}
USAGE = """\
usage: python cli.py bench kernels|training|decode|scaling …

  kernels    forward and backward times of the ops:
             python cli.py bench kernels --ops=delta_rule,window_attention [--peers]
  training   tokens a second of a training step, and where its time goes:
             python cli.py bench training --config gated_deltanet.yaml --config size/400m.yaml --length=4096
  decode     time of the next token, at a batch size and a position:
             python cli.py bench decode --config gated_deltanet.yaml --batch_sizes=[1,64] --positions=[1024,65536]
  scaling    training on 1, 2, 4 … devices with DDP, ZeRO and the like: speed, memory, and whether the losses are equal:
             python cli.py bench scaling --config gated_deltanet.yaml --config size/400m.yaml --devices=[1,2,4]

python cli.py bench KIND --help lists the options of each.
"""


def bench(arguments: list[str]) -> int:
    """Measure, print a table, and leave bench.json; 1 if a result was wrong.

    Args:
        arguments: What to measure, and its options.

    Raises:
        UserError: An argument is wrong.
    """
    console = Console()
    kind = arguments[0] if arguments else ""
    if kind in ("-h", "--help"):
        console.out(USAGE, end="", highlight=False)
        return 0
    if kind not in KINDS:
        raise UserError(f"bench: {kind!r} is not one of {', '.join(KINDS)}{did_you_mean(kind, list(KINDS))}")
    report = KINDS[kind](**_options(kind, arguments[1:]))
    report.write()
    if not console.is_terminal:  # a log file has room for all columns
        console = Console(width=max(console.width, 160))
    console.print(report.table())
    console.out(f"written to {report.folder}", highlight=False)
    return int(report.failed)


def _options(kind: str, arguments: list[str]) -> dict[str, Any]:
    """The arguments of a benchmark out of its command line; what has a dot or is a key of configs overrides those."""
    with_config = kind != "kernels"
    usage = f"cli.py bench {kind}{' --config NAME [--config OVERLAY …]' if with_config else ''} [--key=value …]"
    says = (KINDS[kind].__doc__ or "").partition("\n\n")[0]
    parser = configs.Parser(prog=f"cli.py bench {kind}", usage=usage, description=says)
    if with_config:  # read before all else; named here for the help
        parser.add_argument("-c", "--config", type=str | None, help="A file, or a name in configs/; several overlay.")
    parser.add_function_arguments(KINDS[kind], as_positional=False, skip={"config"})
    names = [name for name in parser.options() if not name.startswith(("help", "print_"))]
    options, items = [], []
    rest = iter(arguments)
    for argument in rest:
        key, equals, value = argument.partition("=")
        if with_config and key in ("-c", "--config"):
            items.append(value if equals else _next(rest, argument))
        elif key in ("--peers", "--compile") and not equals:
            options.append(f"{key}=true")
        elif key.removeprefix("--") in names and key.startswith("--"):
            options.append(argument if equals else f"{argument}={_next(rest, argument)}")
        elif with_config and key.startswith("--") and equals and _of_config(key.removeprefix("--")):
            items.append(argument.removeprefix("--"))
        else:
            options.append(argument)
    with configs.explained(parser):
        values = vars(parser.parse_args(options))
    return {**values, "config": items} if with_config else values


def _of_config(key: str) -> bool:
    """Whether a key belongs to the config."""
    return key.partition(".")[0] in configs.KEYS or "." in key


def _next(rest: Any, argument: str) -> str:
    if (value := next(rest, None)) is None:
        raise UserError(f"{argument} has no value; options are written --key=value")
    return value
