"""Scaling laws: runs planned for a budget, and laws fitted to runs."""

from zoo.scaling.fit import fit
from zoo.scaling.plan import Plan, plan

__all__ = ["Plan", "fit", "plan"]
