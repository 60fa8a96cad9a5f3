"""Finding tasks by name, and the table of all of them."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from kernels import UserError
from mixers import did_you_mean
from zoo.evaluation.task import Options, Task
from zoo.evaluation.tasks import TASKS


def tasks_of(names: Sequence[str], options: Options) -> list[Task]:
    """The named tasks.

    Raises:
        UserError: A name is unknown, or a task refuses its options.
    """
    for name in names:
        if name not in TASKS:
            raise UserError(
                f"tasks: {name!r} is not a task{did_you_mean(name, list(TASKS))} (--tasks=list shows all of them)"
            )
    return [TASKS[name](options) for name in dict.fromkeys(names)]


def task_table() -> Table:
    """All tasks: what each measures, and what it needs."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("task", "measures", "needs"):
        table.add_column(column, no_wrap=column == "task")
    for name, task in TASKS.items():
        table.add_row(name, task.measures, task.needs)
    return table
