"""Logs the run's config."""

import lightning as L

from zoo.train.callbacks.run_callback import RunCallback


class LoggedConfig(RunCallback):
    """Passes the run's config to all loggers."""

    order = 30

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the config once, at the start."""
        for logger in trainer.loggers:
            logger.log_hyperparams(pl_module.config or {})
