"""The source files of classes that a config names and that are not this project's: copies and hashes of them."""

import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo.files.atomic import atomic_write

FOLDER = "code"  # in the folder of a run
OURS = ("kernels", "mixers", "zoo")
INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


@dataclass(frozen=True)
class Source:
    """The file of a class, as it was when it was read."""

    file: Path
    content: bytes

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def copy_name(self, digest: str) -> str:
        """The name of a copy of the file with this hash."""
        return f"{FOLDER}/{self.file.stem}-{digest[:12]}.py"

    def copy_to(self, folder: Path) -> None:
        """Write a copy to the folder of a run; copies of other versions stay."""
        copy = folder / self.copy_name(self.hash)
        copy.parent.mkdir(exist_ok=True)
        with atomic_write(copy) as file:
            file.write(self.content)


def class_paths(config: Any) -> Iterator[str]:
    """Yield the dotted paths of all classes that a config of plain containers names."""
    if isinstance(config, Mapping):
        if isinstance(path := config.get("class_path"), str):
            yield path
        config = config.values()
    elif not isinstance(config, list):
        return
    for part in config:
        yield from class_paths(part)


def sources(config: Any) -> dict[str, Source]:
    """The files of the imported classes in a config that belong neither to this project nor to installed packages."""
    foreign = {}
    for path in class_paths(config):
        module, _, name = path.rpartition(".")
        cls = getattr(sys.modules.get(module), name, None)
        if not isinstance(cls, type) or cls.__module__.partition(".")[0] in OURS:
            continue
        try:
            file = Path(inspect.getsourcefile(cls) or "")
            if not any(file.is_relative_to(folder) for folder in INSTALLED):
                foreign[path] = Source(file, file.read_bytes())
        except (TypeError, OSError):  # of a notebook, or gone
            continue
    return foreign
