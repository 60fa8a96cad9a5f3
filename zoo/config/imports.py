"""Importing what a class path names, and the dotted path of a class."""

import importlib
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType


def import_module(name: str) -> ModuleType:
    """Import a module by name. Its top-level module may be a file or package in the working folder.

    Installed modules come first; a folder without `__init__.py`, such as `runs`, may be in both places. Nothing else is
    ever imported from the working folder, which may be a downloaded model's: neither what a library imports if it can
    (cython, brotli …), nor what a module in that folder imports.
    """
    top = name.partition(".")[0]
    if not top:  # a relative name, for which importlib raises a TypeError
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    installed = None if top in sys.modules else find_spec(top)
    folders = [] if installed is None or installed.origin else installed.submodule_search_locations or []
    if top not in sys.modules and (installed is None or folders):
        importlib.invalidate_caches()  # the file may be younger than the finder's list of the folder
        spec = PathFinder.find_spec(top, [str(Path.cwd())])
        if spec is not None and spec.origin is None:
            spec.submodule_search_locations = [*folders, *(spec.submodule_search_locations or ())]
        if spec is not None and (installed is None or spec.origin is None):
            module = sys.modules[top] = module_from_spec(spec)
            try:
                if spec.loader is not None:  # which a folder without __init__.py lacks
                    spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[top]
                raise
    return importlib.import_module(name)


def import_object(path: str) -> object:
    """Return the object at a dotted path, package.module.name."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def import_path(cls: type) -> str:
    """Return the dotted path of a class, in the outermost package that exports it."""
    packages = cls.__module__.split(".")
    for number in range(1, len(packages)):
        package = ".".join(packages[:number])
        if getattr(import_module(package), cls.__qualname__, None) is cls:
            return f"{package}.{cls.__qualname__}"
    return f"{cls.__module__}.{cls.__qualname__}"
