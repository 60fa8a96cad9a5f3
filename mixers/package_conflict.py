"""Hugging Face's package `kernels` has the same name as this project's: the first one on `sys.path` hides the other."""

import importlib.metadata
import logging
from pathlib import Path

import kernels

log = logging.getLogger(__name__)


def another_is_first() -> ImportError:
    """Return the error message for a `kernels` package that is not this project's."""
    return ImportError(
        f"kernels: {kernels.__file__} is another package of this name, such as Hugging Face's; run "
        f"`pip uninstall kernels`, or put this project before it: PYTHONPATH={Path(__file__).parents[1]}"
    )


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
