"""The memory of a model's layers: exact matrices over pairs of tokens, retention, spectra, and where recall breaks."""

from .inspection import Inspection, inspect
from .layer import Layer, Recurrence, Retention, Spectra

__all__ = ["Inspection", "Layer", "Recurrence", "Retention", "Spectra", "inspect"]
