"""Scaling laws: runs planned for a budget, laws fitted to runs, and how papers count parameters and FLOPs."""

from zoo.scaling.count import Count, count
from zoo.scaling.fit import fit
from zoo.scaling.plan import Plan, plan

__all__ = ["Count", "Plan", "count", "fit", "plan"]
