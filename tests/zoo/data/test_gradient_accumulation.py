"""A checkpoint counts whole optimiser steps, wherever in a step or an epoch it is saved."""

from types import SimpleNamespace
from typing import Any

import pytest

from zoo.data.gradient_accumulation import forget_unfinished, unfinished_batches


def trainer_at(ready: int, processed: int, last: bool, accumulated: int) -> SimpleNamespace:
    """A trainer that has read and done so many batches of its epoch, of which the last one read may be the last."""
    batches = SimpleNamespace(current=SimpleNamespace(ready=ready, processed=processed), is_last_batch=last)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=batches))
    return SimpleNamespace(fit_loop=loop, accumulate_grad_batches=accumulated)


@pytest.mark.parametrize(
    ("ready", "processed", "last", "accumulated", "unfinished"),
    [
        (4, 4, False, 2, 0),
        (5, 4, False, 2, 1),  # being computed
        (5, 5, False, 2, 1),  # done, and waiting for the other one
        (6, 5, False, 2, 2),
        (5, 5, True, 2, 0),  # the end of an epoch ends the step
        (5, 4, True, 2, 1),
        (3, 2, False, 1, 1),
    ],
)
def test_batches_of_the_step_in_progress(ready: int, processed: int, last: bool, accumulated: int, unfinished: int):
    assert unfinished_batches(trainer_at(ready, processed, last, accumulated)) == unfinished


def progress(count: int) -> dict[str, Any]:
    counters = dict.fromkeys(("ready", "started", "processed", "completed"), count)
    return {"total": dict(counters), "current": dict(counters), "is_last_batch": True}


@pytest.mark.parametrize(("processed", "whole", "last"), [(7, 4, False), (8, 8, True)])
def test_a_checkpoint_in_the_last_step_of_an_epoch(processed: int, whole: int, last: bool):
    """If the step is unfinished, its last batch is yet to come; a validation in progress starts again."""
    loops = {"fit_loop": {"epoch_loop.batch_progress": progress(8), "epoch_loop.val_loop.batch_progress": progress(3)}}
    forget_unfinished(trainer_at(8, processed, True, 4), loops)
    batches, validation = loops["fit_loop"].values()
    assert batches == progress(whole) | {"is_last_batch": last}
    assert validation == progress(0) | {"is_last_batch": False}
