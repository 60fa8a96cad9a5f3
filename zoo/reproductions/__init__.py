"""Tables and figures of the papers: what each claims, what it takes to repeat it, and what we measured."""

from zoo.reproductions.read import Paper, read_papers
from zoo.reproductions.row import Row

__all__ = ["Paper", "Row", "read_papers"]
