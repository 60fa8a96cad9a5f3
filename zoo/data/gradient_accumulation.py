"""Checkpoints of whole optimiser steps: a resumed run reads the batches of an unfinished step again.

A checkpoint has no partially accumulated gradients, so nothing else in it may be ahead of the last whole step.
This counts on the progress trackers of Lightning's loops; tried with Lightning 2.6.
"""

from typing import Any

import lightning as L


def unfinished_batches(trainer: L.Trainer) -> int:
    """Number of batches of the optimiser step in progress that are done or being computed; 0 between two steps.

    A step ends with the hooks `on_train_batch_end` of its last batch.
    """
    batches = trainer.fit_loop.epoch_loop.batch_progress
    read, done = batches.current.ready, batches.current.processed
    if batches.is_last_batch and read == done:  # an epoch ends with a step, however few batches it has
        return 0
    return read - done // trainer.accumulate_grad_batches * trainer.accumulate_grad_batches


def convert_batches(trainer: L.Trainer, loops: dict[str, Any], accumulated: int) -> None:
    """Count the batches in `loops`, an entry of the checkpoint being loaded, as a run does that accumulates others.

    Lightning ends a step by the number of batches since the start of the epoch. The counters are changed in place, from
    whole steps of `accumulated` batches each.
    """
    if accumulated == trainer.accumulate_grad_batches:
        return
    batches = loops["fit_loop"]["epoch_loop.batch_progress"]
    for counters in (batches["total"], batches["current"]):
        counters.update({name: n // accumulated * trainer.accumulate_grad_batches for name, n in counters.items()})


def forget_unfinished(trainer: L.Trainer, loops: dict[str, Any]) -> None:
    """Reset the counters in `loops`, an entry of the checkpoint being saved, to the last whole step, in place.

    A validation in progress is reset, too: it would otherwise resume without the batches it has seen.
    """
    progress = loops["fit_loop"]
    if ahead := unfinished_batches(trainer):
        batches = progress["epoch_loop.batch_progress"]
        for counters in (batches["total"], batches["current"]):
            finished = counters["ready"] - ahead
            counters.update(dict.fromkeys(("ready", "started", "processed", "completed"), finished))
        batches["is_last_batch"] = False
    validation = progress["epoch_loop.val_loop.batch_progress"]
    for counters in (validation["total"], validation["current"]):
        counters.update(dict.fromkeys(counters, 0))
    validation["is_last_batch"] = False
