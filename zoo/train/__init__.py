"""Training: the LightningModule, its optimiser and metrics, and the callbacks around each step."""
