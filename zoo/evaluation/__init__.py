"""Evaluation: what a model remembers."""
