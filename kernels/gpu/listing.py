"""Lists of the kernels of a call and of its backward pass, which are not run."""

from collections import Counter
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..core.backend import meta_as_gpu
from .device import HOPPER, Gpu, assumed, without_gluon
from .launch import LaunchSpec
from .paths import Record, dry_run
from .plan import of_rows


def listed(call: Callable[[], Tensor], gpu: Gpu) -> list[Record]:
    """Dry runs on a GPU of a call on the meta device, and of its backward pass if the result has one."""
    of_rows.cache_clear()  # plans depend on the assumed GPU
    try:
        with assumed(gpu), meta_as_gpu(), dry_run() as forward:
            result = call()
            with dry_run() as backward:
                if result.requires_grad:
                    result.sum().backward()
    finally:
        of_rows.cache_clear()
    return [forward, backward]


def show(records: list[Record], gpu: Gpu, constants: bool) -> None:
    """Print the launches of both passes, and why these kernels run."""
    untested = without_gluon() if gpu.capability[0] == HOPPER else None
    console = Console(highlight=False)
    for title, record in zip(("forward", "backward"), records, strict=True):
        if record.launches:
            console.print(_table(title, record.launches, constants))
            if untested is not None:
                console.print(f"{untested}; the reasons below are among the others")
            for path in record.paths:
                console.print(f"[bold]{path.name}[/bold]: {path.why}")


def _table(title: str, launches: list[LaunchSpec], constants: bool) -> Table:
    """The launches of one pass; equal ones, such as those for groups of rows, are one line."""
    columns = ["kernel", "programs", "warps", "stages", "registers", *["constants"] * constants]
    result = Table(*columns, title=title, title_justify="left")
    lines: Counter[tuple[str, ...]] = Counter()
    for spec in launches:
        numbers = (spec.programs, spec.warps, spec.stages, spec.registers)
        line = [spec.name, *("default" if number is None else f"{number:,}" for number in numbers)]
        lines[*line, *[", ".join(f"{key}={value}" for key, value in spec.constants.items())] * constants] += 1
    for (name, programs, *rest), times in lines.items():
        result.add_row(name, programs if times == 1 else f"{times} × {programs}", *rest)
    return result
