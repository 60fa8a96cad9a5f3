"""Runs: their folders, and the functions that start, continue and evaluate them."""
