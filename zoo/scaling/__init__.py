"""Scaling laws: runs planned for a budget, laws fitted to runs, and how papers count parameters and FLOPs."""

from zoo.scaling.fit import fit
from zoo.scaling.plan import Plan, plan

__all__ = ["Plan", "fit", "plan"]
