"""Scaling laws: how papers count the parameters and FLOPs of their models."""
