"""Training: the LightningModule, its optimiser and metrics, and what goes on around the steps."""
