"""Synthetic data that tests recall or has a known entropy."""
