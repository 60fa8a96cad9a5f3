"""Loading trained models from runs, checkpoints and exported folders."""
