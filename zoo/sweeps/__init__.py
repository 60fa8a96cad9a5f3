"""Ablations as data: a YAML of axes becomes runs, one results row each, and one table and picture of them."""

from zoo.sweeps import report
from zoo.sweeps.ablation import sweep
from zoo.sweeps.comparison import compare
from zoo.sweeps.plan import Run, Sweep
from zoo.sweeps.runner import Failure, Runner, failed, result

__all__ = ["Failure", "Run", "Runner", "Sweep", "compare", "failed", "report", "result", "sweep"]
