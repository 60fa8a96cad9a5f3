"""Config files, found by name."""

from pathlib import Path

from kernels import UserError
from mixers import did_you_mean

_PACKAGE = Path(__file__).parents[1]

# next to the package in a checkout, inside it in a wheel
CONFIGS = next(folder for folder in (_PACKAGE.parent / "configs", _PACKAGE / "configs") if folder.is_dir())


def find_config(name: str | Path) -> Path:
    """The file of a config: a path that exists, or a name in `configs/`, with or without `.yaml`.

    Raises:
        UserError: The file does not exist; the message suggests a similar name.
    """
    for candidate in (Path(name), CONFIGS / name, CONFIGS / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    names = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))
    raise UserError(f"config: {str(name)!r} is neither a file nor one of configs/{did_you_mean(str(name), names)}")
