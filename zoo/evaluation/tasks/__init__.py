"""The tasks by name."""

from zoo.evaluation.task import Task
from zoo.evaluation.tasks.needles import (
    MultiKey1,
    MultiKey2,
    PassKey,
    SingleNeedle1,
    SingleNeedle2,
    SingleNeedle3,
)
from zoo.evaluation.tasks.niah import NiahEasy, NiahStandard
from zoo.evaluation.tasks.state_recall import StateRecall

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        *(SingleNeedle1, SingleNeedle2, SingleNeedle3, MultiKey1, MultiKey2, PassKey),
        *(NiahEasy, NiahStandard, StateRecall),
    )
}
