"""StateX: a trained model with a larger state in some layers, to train on."""

from zoo.saved.grow.enlarge import Grown, statex

__all__ = ["Grown", "statex"]
