"""A check that all processes of a run train on the same data, with the same tokenizer, config and code.

Each node reads the files of its disk. If these differ, processes exchange gradients of different problems, and no
number shows it. So processes compare what determines a step before the first one, in one exchange.
"""

import json
import socket
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning as L
import torch

from kernels.errors import UserError
from zoo.data.resumable import ResumableData
from zoo.files.hashing import digest
from zoo.train.shards import of_all

PACKAGES = ("kernels", "mixers", "zoo")
LONGEST = 64  # characters of a value that is sent; a longer one is sent as its hash


def check_same(trainer: L.Trainer, tokenizer: Any, config: dict[str, Any] | None) -> None:
    """Compare the code, the config, the tokenizer and the data of all processes.

    Raises:
        UserError: A process differs from the first one; in all processes.
    """
    if trainer.world_size == 1:
        return
    described = {"the code of this project": code_digest(), "the version of PyTorch": torch.__version__}
    data = getattr(trainer, "datamodule", None)
    by_content = isinstance(data, ResumableData)
    described |= {key: value for key, value in _entries(config or {}) if not (by_content and _is_path_of_data(key))}
    if isinstance(data, ResumableData):
        described |= {f"data.{name}": _short(value) for name, value in data.identity().items()}
    if tokenizer is not None:
        described["the tokenizer"] = digest(tokenizer.to_json().encode())
    first, *others = of_all((socket.gethostname(), described))
    for rank, (machine, other) in enumerate(others, start=1):
        for name in first[1] | other:
            values = [each.get(name, "missing") for each in (first[1], other)]
            if values[0] != values[1]:
                raise UserError(
                    f"{name} differs between processes: {values[0]} in process 0 on {first[0]}, {values[1]} in process "
                    f"{rank} on {machine}; all processes must have the same data, config and code"
                )


def _entries(value: Any, key: str = "") -> list[tuple[str, str]]:
    """All values in a config, by their dotted keys."""
    if isinstance(value, dict) and value:
        return [entry for name, part in value.items() for entry in _entries(part, f"{key}.{name}" if key else name)]
    return [(key, _short(value))]


def _is_path_of_data(key: str) -> bool:
    """Return whether a key holds where data is, which may differ between nodes as long as the data does not."""
    return key.startswith("data.") and key.endswith("path") and not key.endswith("class_path")


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= LONGEST else digest(text.encode())


@cache
def code_digest() -> str:
    """The hash of all source files of this project."""
    code = b""
    for name in PACKAGES:
        spec = find_spec(name)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            for file in sorted(Path(folder).rglob("*.py")):
                code += file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes()
    return digest(code)
