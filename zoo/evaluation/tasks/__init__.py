"""All tasks by name. A task is added by its file in this folder, and its line here."""

from zoo.evaluation.task import Task
from zoo.evaluation.tasks.needles import MultiKey1, MultiKey2, PassKey, SingleNeedle1, SingleNeedle2, SingleNeedle3
from zoo.evaluation.tasks.niah import NiahEasy, NiahStandard
from zoo.evaluation.tasks.perplexity import Perplexity
from zoo.evaluation.tasks.state_recall import StateRecall
from zoo.evaluation.tasks.throughput import Throughput
from zoo.evaluation.tasks.token_tasks import TOKEN_TASKS

_NEEDLES = (SingleNeedle1, SingleNeedle2, SingleNeedle3, MultiKey1, MultiKey2, PassKey)
_RECALL = (NiahEasy, NiahStandard, StateRecall)
_CLASSES: tuple[type[Task], ...] = (*_NEEDLES, *_RECALL, *TOKEN_TASKS, Perplexity, Throughput)

TASKS: dict[str, type[Task]] = {task.name: task for task in _CLASSES}
