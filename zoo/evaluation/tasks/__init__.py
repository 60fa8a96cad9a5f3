"""All tasks by name. A task is added by its file in this folder, and its line here."""

from zoo.evaluation.task import Task
from zoo.evaluation.tasks.perplexity import Perplexity
from zoo.evaluation.tasks.throughput import Throughput
from zoo.evaluation.tasks.token_tasks import TOKEN_TASKS

_CLASSES: tuple[type[Task], ...] = (Perplexity, Throughput, *TOKEN_TASKS)
TASKS: dict[str, type[Task]] = {task.name: task for task in _CLASSES}
