"""Config files, found by name."""

from pathlib import Path

from kernels import UserError
from mixers import similar

_PACKAGE = Path(__file__).parents[1]

# next to the package in a checkout, inside it in a wheel
CONFIGS = next(folder for folder in (_PACKAGE.parent / "configs", _PACKAGE / "configs") if folder.is_dir())


def find_config(name: str | Path) -> Path:
    """The file of a config: a path that exists, or a name in `configs/`, with or without `.yaml`.

    Raises:
        UserError: The name is empty, or the file does not exist; the message suggests a similar name.
    """
    if not str(name).strip():
        raise UserError(f"config: {str(name)!r} is empty; name a file, or one of configs/")
    for candidate in (Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    files = sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))
    wanted = Path(name).with_suffix("").as_posix()
    same = [file for file in files if file == wanted] or [file for file in files if file.endswith(f"/{wanted}")]
    close = [f"'{file}.yaml'" for file in same or similar(wanted, files)]
    hint = f"; did you mean {' or '.join(close)}?" if 0 < len(close) <= 3 else ""
    if Path(name).is_dir():
        hint = f"; {name} is a folder, and the config of a run is {name}/config.yaml"
    raise UserError(f"config: {str(name)!r} is neither a file nor one of configs/{hint}")
