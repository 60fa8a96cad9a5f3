"""Trained models, out of runs, checkpoints and exported folders."""
