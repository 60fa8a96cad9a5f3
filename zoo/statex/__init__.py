"""StateX: a trained model with a larger state in some layers, to train on."""

from zoo.statex.grow import Grown, statex

__all__ = ["Grown", "statex"]
