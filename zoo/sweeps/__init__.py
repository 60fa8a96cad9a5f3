"""Sweeps: a YAML of axes defines runs, whose results make one table and one picture."""

from zoo.sweeps import report
from zoo.sweeps.ablation import sweep
from zoo.sweeps.comparison import compare
from zoo.sweeps.gates import Gate
from zoo.sweeps.plan import Run, Sweep
from zoo.sweeps.runner import Failure, Runner, failed, result

__all__ = ["Failure", "Gate", "Run", "Runner", "Sweep", "compare", "failed", "report", "result", "sweep"]
