"""Hugging Face's package `kernels` has the same name as this project's: the first one on `sys.path` hides the other.

Importing this module raises an ImportError of one sentence unless `kernels` is this project's.
"""

import importlib.metadata
import importlib.util
import logging
from pathlib import Path

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[1]


def _conflict() -> str | None:
    """The sentence about another package that is found, or was imported, as `kernels`; None without one."""
    try:
        spec = importlib.util.find_spec("kernels")
    except ValueError:  # a module that was made by hand has no spec
        spec = None
    origin = None if spec is None else spec.origin
    theirs = f"{origin or 'what was imported as kernels'} is another package of this name, such as Hugging Face's"
    if origin is None or Path(origin).resolve() != ROOT / "kernels" / "__init__.py":
        advice = "run `pip uninstall kernels`, or put this project before it: PYTHONPATH="
        return f"kernels: {theirs}; {advice}{Path(__file__).parents[1]}"
    import kernels

    if not hasattr(kernels, "UserError"):  # both were installed into one folder, the other one last
        return f"kernels: {theirs}, which replaced this project's; install this project in an environment of its own"
    return None


def warn_of_hidden() -> None:
    """Log a warning if this project's package hides the other one."""
    try:
        other = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    log.warning(
        "kernels: Hugging Face's package of this name (%s) is installed, and hidden by this project's; in this process "
        "transformers cannot load kernels from the Hub",
        other,
    )


if (conflict := _conflict()) is not None:
    raise ImportError(conflict)
