"""Tells loggers what a run is made of."""

import lightning as L

from zoo.train.callbacks.run_callback import RunCallback


class LoggedConfig(RunCallback):
    """Tells all loggers what the run is made of."""

    order = 30

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Once, at the start."""
        for logger in trainer.loggers:
            logger.log_hyperparams(pl_module.config or {})
