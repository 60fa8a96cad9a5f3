"""Scaling laws: the conventions by which papers count parameters and FLOPs."""
