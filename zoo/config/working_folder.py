"""The working folder as the last place to import modules from: for the user's code and configs, not for libraries.

Many libraries import optional packages if they can (cython, brotli …). A file of such a name in the working folder,
which may be the folder of a downloaded model, would run then.
"""

import os
import pkgutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType
from typing import Any

OURS = ("zoo", "mixers", "kernels", "cli", "jsonargparse")  # packages that import what a config names
INSTALLED = {"site-packages", "dist-packages"}


def search() -> None:
    """Add the working folder to `sys.path`, unless it is there, for everything but installed libraries."""
    folder = os.getcwd()
    if folder in sys.path:
        return
    sys.path.append(folder)  # last, so as not to shadow the standard library
    sys.path_importer_cache[folder] = _NotForLibraries(pkgutil.get_importer(folder))


class _NotForLibraries:
    """The finder of a folder, which finds nothing for libraries."""

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, target: Any = None) -> ModuleSpec | None:
        """Find a module in the folder."""
        if _by_library(sys._getframe(1)):
            return None
        spec: ModuleSpec | None = self._finder.find_spec(name, target)
        return spec

    def invalidate_caches(self) -> None:
        """Look at the folder again."""
        self._finder.invalidate_caches()


def _by_library(frame: FrameType | None) -> bool:
    """Return whether the module that imports is that of an installed library."""
    while frame is not None:
        name, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if not file.startswith("<frozen importlib") and name.partition(".")[0] != "importlib":
            return bool(INSTALLED & {*Path(file).parts}) and name.partition(".")[0] not in OURS
        frame = frame.f_back
    return False
