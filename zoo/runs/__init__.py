"""Runs: their folders, and the functions that start, resume and evaluate them."""
