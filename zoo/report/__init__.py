"""The report: runs, evaluations and sweeps as one HTML page that needs neither network nor server."""

from zoo.report.page import report

__all__ = ["report"]
