"""Config files, found by name."""

import logging
from pathlib import Path

from kernels import UserError
from mixers import similar

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]

# next to the package in a checkout, inside it in a wheel
CONFIGS = next(folder for folder in (_PACKAGE.parent / "configs", _PACKAGE / "configs") if folder.is_dir())


def find_config(name: str | Path) -> Path:
    """The file of a config: a name in `configs/`, with or without `.yaml`, or a path that exists.

    A name in `configs/` means that config, also where the working folder has a file of this name, which is `./NAME`. A
    `Path` is never a name in `configs/` if its file exists.

    Raises:
        UserError: The name is empty, or the file does not exist; the message suggests a similar name.
    """
    if not str(name).strip():
        raise UserError(f"config: {str(name)!r} is empty; name a file, or one of configs/")
    shipped = [CONFIGS / name, CONFIGS / f"{name}.yaml"]
    is_path = isinstance(name, Path) or name.startswith((".", "/", "~"))
    for candidate in [Path(name), *shipped] if is_path else [*shipped, Path(name)]:
        if candidate.is_file():
            if not is_path and candidate in shipped and Path(name).is_file() and not Path(name).samefile(candidate):
                log.warning(
                    "config: %s is the config of this project; write ./%s for the file in this folder", name, name
                )
            return candidate
    files = sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))
    wanted = (Path(name).parent / Path(name).stem).as_posix()
    same = [file for file in files if file == wanted] or [file for file in files if file.endswith(f"/{wanted}")]
    close = [f"'{file}.yaml'" for file in same or similar(wanted, files)]
    hint = f"; did you mean {' or '.join(close)}?" if 0 < len(close) <= 3 else ""
    if Path(name).is_dir():
        hint = f"; {name} is a folder, and the config of a run is {name}/config.yaml"
    raise UserError(f"config: {str(name)!r} is neither a file nor one of configs/{hint}")
