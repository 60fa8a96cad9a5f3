"""All tasks by name. A task is added by its file in this folder, and its line here; any class is found by its path."""

from collections.abc import Sequence
from contextlib import suppress

from rich.table import Table

from kernels import Option, UserError
from mixers import did_you_mean
from zoo.config.explain import wrong_class
from zoo.config.imports import import_object
from zoo.display import new_table
from zoo.evaluation.lm_eval.paper_tasks import PAPER_TASKS
from zoo.evaluation.lm_eval.task import PREFIX, lm_eval_task
from zoo.evaluation.task import Options, Task
from zoo.evaluation.tasks.decoding import Decoding
from zoo.evaluation.tasks.needles import NEEDLE_TASKS
from zoo.evaluation.tasks.perplexity import Perplexity
from zoo.evaluation.tasks.token_tasks import TOKEN_TASKS

_CLASSES: tuple[type[Task], ...] = (*NEEDLE_TASKS, *TOKEN_TASKS, Perplexity, Decoding)

OF_SOME_TASKS = ("depths", "haystack", "data", "held_out")  # options
TASKS: dict[str, type[Task]] = {task.name: task for task in _CLASSES}


def tasks_of(names: Sequence[str], options: Options) -> list[Task]:
    """The named tasks, each once.

    Raises:
        UserError: A name is unknown, a task refuses its options, or none of the tasks uses an option.
    """
    tasks = [_task_class(name)(options) for name in dict.fromkeys(names)]
    for option in OF_SOME_TASKS:
        if getattr(options, option) is not None and not any(option in task.uses for task in tasks):
            raise UserError(
                f"{option}: none of the tasks uses it ({', '.join(task.name for task in tasks)}); leave it out"
            )
    return tasks


def _task_class(name: str) -> type[Task]:
    """The task of a name, or at a dotted path, package.module.Class, which may be in the working folder."""
    if name in TASKS:
        return TASKS[name]
    if name.startswith(PREFIX):
        return lm_eval_task(name)
    if "." in name:
        cls: object = None
        with suppress(Exception):  # whatever is wrong is explained below
            cls = import_object(name)
        if not (isinstance(cls, type) and issubclass(cls, Task)):
            raise UserError(wrong_class([Task], name, "tasks", []))
        return cls
    names = [*TASKS, *(PREFIX + task for task in PAPER_TASKS)]
    hint = did_you_mean(name, names) or f"; if it is one of lm-eval, write {PREFIX}{name}"
    raise UserError(f"tasks: {name!r} is not a task{hint} (", Option("tasks", "list"), " shows all of them)")


def task_table() -> Table:
    """All tasks: what each measures, and what it needs."""
    columns = ("task", "measures", "needs")
    table = new_table(columns, left=columns, wrapped=columns[1:])
    for task in (*TASKS.values(), *map(lm_eval_task, PAPER_TASKS)):
        table.add_row(task.name, task.measures, task.needs)
    table.add_row(f"{PREFIX}NAME", "any other task, group or tag of lm-eval; NAME@8 with 8 examples", "data")
    return table
