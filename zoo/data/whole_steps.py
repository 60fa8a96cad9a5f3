"""Checkpoints of whole optimiser steps: what was read for a step in progress is read again by the run that continues.

Gradients that are still being accumulated are in no checkpoint; so nothing else in it may be ahead of the last step.
"""

from typing import Any

import lightning as L


def unfinished_batches(trainer: L.Trainer) -> int:
    """Batches of the optimiser step in progress that are done or being computed; 0 between two steps.

    Before the hooks `on_train_batch_end` of its last batch a step is in progress.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress
    read, done = batches.current.ready, batches.current.processed
    if batches.is_last_batch and read == done:  # an epoch ends with a step, however few batches it has
        return 0
    return read - done // trainer.accumulate_grad_batches * trainer.accumulate_grad_batches


def forget_unfinished(trainer: L.Trainer, loops: dict[str, Any]) -> None:
    """Put the counters of Lightning's loops in a checkpoint back to the last whole step.

    A validation in progress is forgotten, too: it would go on without the batches that it has seen.

    Args:
        trainer: The trainer whose checkpoint it is.
        loops: The entry `loops` of the checkpoint; it is changed.
    """
    progress = loops["fit_loop"]
    if ahead := unfinished_batches(trainer):
        batches = progress["epoch_loop.batch_progress"]
        for counters in (batches["total"], batches["current"]):
            whole = counters["ready"] - ahead
            counters.update(ready=whole, started=whole, processed=whole, completed=whole)
        batches["is_last_batch"] = False
    validation = progress["epoch_loop.val_loop.batch_progress"]
    for counters in (validation["total"], validation["current"]):
        counters.update(dict.fromkeys(counters, 0))
    validation["is_last_batch"] = False
