"""Loggers beside the run's own file: Lightning's, told in a config where the run is."""

from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from kernels.errors import UserError

FOLDER, NAME = "{run}", "{name}"  # in strings under `trainer`


def for_run(config: Namespace, folder: Path | None) -> Namespace:
    """A config whose `trainer` knows the run: `{run}` stands for its folder and `{name}` for the name of that.

    Args:
        config: A parsed config, which is left as it is: what is saved of a run holds for another one, too.
        folder: The run's folder; None, where nothing is trained, leaves out loggers.

    Returns:
        A copy.
    """
    config = config.clone()
    if folder is None:
        config.trainer.logger = None
    else:
        config.trainer = _filled(config.trainer, {FOLDER: str(folder), NAME: folder.resolve().name})
    return config


def _filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        for placeholder, name in names.items():
            value = value.replace(placeholder, name)
        return value
    if isinstance(value, Namespace):
        return Namespace({key: _filled(own, names) for key, own in vars(value).items()})
    if isinstance(value, dict):
        return {key: _filled(own, names) for key, own in value.items()}
    if isinstance(value, list):
        return [_filled(own, names) for own in value]
    return value


def missing_package(error: BaseException | None) -> UserError | None:
    """What to tell if a logger could not be built as its package is not installed; None if that was not the reason."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    said = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
    return UserError(f"trainer.logger: {said}; install what the loggers need with pip install -e '.[loggers]'")
