"""Finding tasks by name, and the table of all of them."""

from collections.abc import Sequence

from rich import box
from rich.table import Table

from kernels import UserError
from mixers import did_you_mean
from zoo.evaluation.lm_eval.catalogue import CATALOGUE
from zoo.evaluation.lm_eval.presets import PRESETS
from zoo.evaluation.lm_eval.task import PREFIX, lm_eval_task
from zoo.evaluation.task import Options, Task
from zoo.evaluation.tasks import TASKS


def tasks_of(names: Sequence[str], options: Options) -> list[Task]:
    """The named tasks, and those of the named presets.

    Raises:
        UserError: A name is unknown, a task refuses its options, or presets want one of them at different lengths.
    """
    chosen: dict[str, Options] = {}
    for name in names:
        for task, its_options in PRESETS[name].choices(options) if name in PRESETS else [(name, options)]:
            if chosen.setdefault(task, its_options) != its_options:
                raise UserError(f"tasks: {task} is wanted at different lengths; evaluate {name} separately")
    return [_named(name)(its_options) for name, its_options in chosen.items()]


def _named(name: str) -> type[Task]:
    if name in TASKS:
        return TASKS[name]
    if name.startswith(PREFIX):
        return lm_eval_task(name)
    names = [*TASKS, *PRESETS, *(PREFIX + listed for listed in CATALOGUE)]
    raise UserError(f"tasks: {name!r} is not a task{did_you_mean(name, names)} (--tasks=list shows all of them)")


def task_table() -> Table:
    """All tasks and presets: what each measures, and what it needs."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("task", "measures", "needs"):
        table.add_column(column, no_wrap=column == "task", overflow="fold")
    for task in (*TASKS.values(), *map(lm_eval_task, CATALOGUE)):
        table.add_row(task.name, task.measures, task.needs)
    table.add_row(f"{PREFIX}NAME", "any other task, group or tag of lm-eval; NAME@8 with 8 examples", "data")
    table.add_section()
    for name, preset in PRESETS.items():
        table.add_row(name, preset.measures, preset.needs)
    return table
