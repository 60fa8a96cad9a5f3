"""Ablations as data: a YAML of axes becomes runs, one results row each, and one table and picture of them."""

from . import report
from .plan import Run, Sweep
from .runner import Failure, Runner, failed, result

__all__ = ["Failure", "Run", "Runner", "Sweep", "failed", "report", "result"]
