"""Sweeps: a YAML of axes defines runs, whose results make one table and one picture."""

from zoo.experiments import results
from zoo.experiments.commands import compare, sweep
from zoo.experiments.definition import Gate, Run, Sweep
from zoo.experiments.runner import Failure, Runner, failed, result

__all__ = ["Failure", "Gate", "Run", "Runner", "Sweep", "compare", "failed", "result", "results", "sweep"]
