"""Saved models: opening, exporting and converting them, and enlarging their state."""
