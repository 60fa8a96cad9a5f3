"""All tasks by name. A task is added by its file in this folder, and its line here."""

from zoo.evaluation.task import Task
from zoo.evaluation.tasks.perplexity import Perplexity
from zoo.evaluation.tasks.throughput import Throughput

TASKS: dict[str, type[Task]] = {task.name: task for task in (Perplexity, Throughput)}
