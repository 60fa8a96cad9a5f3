"""The families of public checkpoints, one file each."""

from zoo.conversion.families import fla_gla
from zoo.conversion.family import Family

FAMILIES: tuple[Family, ...] = (fla_gla.FAMILY,)

__all__ = ["FAMILIES"]
