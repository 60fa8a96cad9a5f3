"""Text that every machine with Python has: its standard library, its documentation, and the installed packages."""

import hashlib
import importlib.util
import logging
import os
import sysconfig
import tokenize
from collections.abc import Collection, Iterator
from pathlib import Path

log = logging.getLogger(__name__)

LIBRARY, DOCUMENTATION, PACKAGES = PARTS = ("embedded:library", "embedded:documentation", "embedded:packages")
# Not written for readers: tests, generated tables, vendored or obsolete packages.
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}
_EXCLUDED |= {"idle_test", "pydoc_data", "__pycache__", "__phello__"}
_TOPICS = "pydoc_data/topics.py"
_PACKAGED = (".py", ".md", ".rst", ".txt", ".pyi")
_LARGEST = 400_000  # bytes of a package's file; larger ones are mostly tables

Named = tuple[str, Path]  # a file and its name, which orders it


def embedded_files(part: str | None) -> list[Named]:
    """The files of a part of the embedded corpus, ordered by a hash of the name, so that any prefix is a mixture.

    Args:
        part: One of `PARTS`. None: the library and the documentation.
    """
    if part == PACKAGES:
        folders = {Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib")}  # of installed packages
        named = [pair for folder in sorted(folders) for pair in _package_files(folder)]
    else:
        named = [*(_library_files() if part != DOCUMENTATION else []), *(_topics() if part != LIBRARY else [])]
    return sorted(named, key=lambda pair: hashlib.sha256(pair[0].encode()).digest())


def embedded_texts(files: list[Named]) -> Iterator[str]:
    """The documents in some files of the embedded corpus."""
    for name, file in files:
        if name == _TOPICS:
            from pydoc_data.topics import topics  # 0.5 MB, rarely needed

            yield from (topics[key] for key in sorted(topics))
            continue
        try:
            # honours a coding line
            with tokenize.open(file) if file.suffix == ".py" else file.open(encoding="utf-8") as source:
                yield source.read()
        except (SyntaxError, UnicodeDecodeError):
            log.info("Skipped %s of the embedded corpus: it cannot be decoded.", file)


def _library_files() -> list[Named]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in _walk(root, (".py",), _EXCLUDED) if not file.name.startswith("_sysconfigdata")]
    return [(file.relative_to(root).as_posix(), file) for file in files]


def _topics() -> list[Named]:
    topics = importlib.util.find_spec("pydoc_data.topics") if importlib.util.find_spec("pydoc_data") else None
    return [(_TOPICS, Path(topics.origin))] if topics and topics.origin else []


def _package_files(root: Path) -> Iterator[Named]:
    for file in _walk(root, _PACKAGED, {"__pycache__"}):
        if file.stat().st_size <= _LARGEST:
            yield file.relative_to(root).as_posix(), file


def _walk(root: Path, suffixes: tuple[str, ...], excluded: Collection[str]) -> Iterator[Path]:
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in excluded and not name.startswith("config-")]
        yield from (Path(folder, name) for name in names if name.endswith(suffixes))
