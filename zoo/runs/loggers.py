"""Additional Lightning loggers, whose configs may refer to the run by placeholders."""

from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from kernels.errors import UserError

FOLDER, NAME = "{run}", "{name}"  # placeholders in strings under `trainer`


def for_run(config: Namespace, folder: Path) -> Namespace:
    """Replace the placeholders in a config's `trainer`: `{run}` by the run's folder, `{name}` by the folder's name.

    Args:
        config: A parsed config. It is not changed, so that the saved config can start another run.
        folder: The run's folder.

    Returns:
        A changed copy.
    """
    config = config.clone()
    config.trainer = _filled(config.trainer, {FOLDER: str(folder), NAME: folder.resolve().name})
    return config


def _filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        for placeholder, name in names.items():
            value = value.replace(placeholder, name)
        return value
    if isinstance(value, Namespace):
        return Namespace({key: _filled(item, names) for key, item in vars(value).items()})
    if isinstance(value, dict):
        return {key: _filled(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, names) for item in value]
    return value


def missing_package(error: BaseException | None) -> UserError | None:
    """The error to show if a logger's package is not installed; None if `error` has another cause."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    return UserError(f"trainer.logger: {reason}; install the loggers' packages with pip install -e '.[loggers]'")
