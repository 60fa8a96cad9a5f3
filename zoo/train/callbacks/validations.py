"""Validations that Lightning would leave out."""

from typing import Any

import lightning as L

from zoo.train.callbacks.run_callback import RunCallback
from zoo.train.lightning_internals import logged_with_last_step, validates_this_epoch


class Validations(RunCallback):
    """Adds a final validation if a run ends between two, and makes up for one that a stopped run missed."""

    order = 170  # after all callbacks that use the validations it runs

    def __init__(self) -> None:
        self._step = -1  # of the last validation
        self._batch = 0  # number of batches before the last validation, over all epochs

    def state_dict(self) -> dict[str, Any]:
        return {"batch": self._batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batch = state_dict["batch"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run the validation that was due when the run was stopped; its loss may be the best."""
        loop = trainer.fit_loop.epoch_loop
        batches, every = loop.batch_progress, trainer.val_check_batch
        by_epoch = trainer.check_val_every_n_epoch is not None
        read = batches.current.ready if by_epoch else batches.total.ready
        due = bool(read and every) and read % every == 0 and validates_this_epoch(trainer)
        if due and self._batch != batches.total.ready:
            loop.val_loop.restarting = False
            self._run(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._step, self._batch = trainer.global_step, trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Run the final validation, with Lightning's validation loop as between steps."""
        stopped = trainer.interrupted or trainer.received_sigterm
        if self._step != trainer.global_step and not trainer.fast_dev_run and not stopped:
            with logged_with_last_step(trainer):  # like the metrics of other validations
                self._run(trainer)

    def _run(self, trainer: L.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        if not loop.skip:
            trainer.validating = True
            loop.run()
            trainer.training = True
