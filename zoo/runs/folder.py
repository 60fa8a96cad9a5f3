"""The folder of a run: naming it, creating and locking it, and finding it again to resume."""

import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from kernels import Option, UserError
from mixers import did_you_mean
from zoo.files.links import held_lock
from zoo.files.output import is_config_of_run, make_folder
from zoo.train.signals import PARENT

log = logging.getLogger(__name__)

RUNS = Path("runs")
_INHERITED = "ZOO_RUN"  # by the processes of other devices: the folder that the first process chose
LOCK = ".lock"
REPLACED = ".replaced"  # folder for the files of a run until the one that replaces it has trained a batch
MOVING = ".replacing"  # its name while some of the files are in the run's folder

# Files that a run writes before its first checkpoint, `config.yaml` first; next to that, they are safe to overwrite.
_REPLACED_BY_A_RUN = re.compile(
    r"config\.yaml|tokenizer\.json|tokenizer_config\.json|metrics\.jsonl|metrics\.csv|loss\.png|samples\.txt|results\.json|history\.jsonl"
    r"|code/[^/]+-[0-9a-f]{12}\.py|fit-profile[^/]*\.(txt|json)"  # of configs/train/profile.yaml
)
_WRITTEN_BY_A_RUN = re.compile(
    rf"({_REPLACED_BY_A_RUN.pattern}|(\w+/)?\.[^/]*\.partial|checkpoints/shards-[\w-]+/.*"
    r"|(lightning_logs/)?version_\d+/.*|tensorboard/.*|wandb/.*|\.lock)"
)


def folder_of(name: str, root: Path = RUNS) -> Path:
    """The folder of a run in `root` by its name, which is a path if it begins with /, ./, ../, ~ or that of `root`."""
    is_path = name.startswith(("/", "./", "../", "~")) or Path(name).is_relative_to(root)
    return Path(name).expanduser() if is_path else root / name


def new_run(name: str | None, config: str, root: Path = RUNS) -> Path:
    """Create the folder of a new run, to be locked by `claimed`: `ROOT/NAME`, or `ROOT/CONFIG-TIME` without a name.

    Args:
        name: A name or path, as for `folder_of`.
        config: Name of the config, for the automatic name.
        root: Where runs without a path lie.

    Returns:
        The folder.

    Raises:
        UserError: The folder is not writable.
    """
    inherited = os.environ.get(_INHERITED)
    if inherited and int(os.environ.get("LOCAL_RANK", "0")) > 0:
        return Path(inherited)
    # processes of one job on several nodes share its id, but not the clock
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    automatic = f"{config}-{job or time.strftime('%Y%m%d-%H%M%S')}"
    root = root.expanduser()  # as Lightning does for its files
    folder = folder_of(name or automatic, root)
    first, number = _first_process(), 1
    while first and not name and not job and folder.exists():  # another run started in the same second
        number += 1
        folder = root / f"{automatic}-{number}"
    make_folder(folder, "run")
    os.environ[_INHERITED] = str(folder)
    return folder


def _first_process() -> bool:
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", "0")))) == 0


def _check_new(folder: Path, overwrite: bool) -> None:
    """Raise a UserError if a folder has anything but files that a run writes before its first checkpoint.

    With `overwrite`, set the files of a whole run aside instead.
    """
    files = [name.as_posix() for name in _files(folder)]
    if not overwrite and any(name.endswith(".ckpt") for name in files):
        raise UserError(
            f"run: {folder} exists already; continue it with ",
            Option("resume", str(folder)),
            ", replace it with ",
            Option("overwrite", True),
            ", or choose another run",
        )
    others = [name for name in files if not re.fullmatch(r"checkpoints/[^/]*\.ckpt", name)]
    strange = (name for name in others if (folder / name).is_symlink() or not _WRITTEN_BY_A_RUN.fullmatch(name))
    if (other := next(strange, None)) is not None:
        raise UserError(
            f"run: {folder} exists already and holds {other}, which is not a run's file; choose another run"
        )
    replaced = [name for name in files if _REPLACED_BY_A_RUN.fullmatch(name)]
    if replaced and not any(name.endswith(".ckpt") for name in files) and not is_config_of_run(folder / "config.yaml"):
        raise UserError(
            f"run: {folder} exists already and holds {replaced[0]}, but not the config.yaml of a run, so nothing there "
            "is replaced; choose another run"
        )
    if overwrite:
        parts = _parts(folder)
        (folder / MOVING).mkdir()
        for path in parts:
            path.rename(folder / MOVING / path.name)
        (folder / MOVING).rename(folder / REPLACED)
        return
    if any(name != LOCK for name in files):
        log.warning("run: the run in %s was stopped before its first checkpoint; it starts again", folder)


def _parts(folder: Path) -> list[Path]:
    """The files and folders of the run in a folder."""
    return [path for path in folder.iterdir() if path.name not in (LOCK, REPLACED, MOVING)]


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _files(folder: Path) -> list[Path]:
    """Paths of all files and links in a folder, relative to it."""
    paths = sorted(folder.rglob("*"))
    return [path.relative_to(folder) for path in paths if path.is_symlink() or not path.is_dir()]


def _move_back(folder: Path) -> None:
    """Move the files that were set aside back, next to files that were put into the folder meanwhile."""
    for name in _files(folder / MOVING):
        for parent in (folder / name).parents:
            if parent != folder and parent.is_relative_to(folder) and parent.is_symlink():
                raise UserError(f"run: {parent} is a link where the run that is put back has a folder; remove it")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / MOVING / name).rename(folder / name)
    shutil.rmtree(folder / MOVING)  # empty folders


def _put_back(folder: Path) -> None:
    """Replace the files of a new run with those of the run that was set aside; files of neither run stay."""
    for part in _parts(folder):
        names = [part.relative_to(folder) / name for name in _files(part)] if _is_folder(part) else [Path(part.name)]
        for name in names:
            if _WRITTEN_BY_A_RUN.fullmatch(name.as_posix()):
                (folder / name).unlink()
        if _is_folder(part):
            remove_empty(part)
    (folder / REPLACED).rename(folder / MOVING)  # from here on, nothing is removed
    _move_back(folder)
    log.warning("run: the new run trained no batch, so the run in %s is as before", folder)


def _recover(folder: Path) -> None:
    """Finish what a killed process left: keep a new run that has a checkpoint, or else put the old run back."""
    if _is_folder(folder / MOVING):
        _move_back(folder)
    if _is_folder(folder / REPLACED):
        (_drop_replaced if has_checkpoint(folder) else _put_back)(folder)


def _busy(folder: Path) -> str:
    return f"run: {folder} is being trained by another process; wait for it, or name another run"


def _recovered(folder: Path) -> Path:
    """The folder, after its first process has put back a run that a killed run was about to replace.

    Raises:
        UserError: Another process holds the lock.
    """
    aside = (folder / REPLACED, folder / MOVING)
    if not any(map(_is_folder, aside)):
        return folder
    if _first_process():
        with held_lock(folder / LOCK, _busy(folder)):
            _recover(folder)
        return folder
    stop = time.monotonic() + 60
    while any(map(_is_folder, aside)):
        if time.monotonic() > stop:
            raise UserError(f"resume: the first process has not put back the run in {folder} within 60 seconds")
        time.sleep(0.1)
    return folder


def _drop_replaced(folder: Path) -> None:
    """Remove the run that was set aside, if there is one."""
    if _is_folder(folder / REPLACED):
        shutil.rmtree(folder / REPLACED)


@contextmanager
def claimed(folder: Path, new: bool, overwrite: bool = False) -> Iterator[Callable[[], None]]:
    """Lock the folder of a run for this process and its children, until the block or the process ends.

    Args:
        folder: The run's folder.
        new: Whether a new run starts there. The folder may then hold the files of a run that was killed before its
            first checkpoint, and nothing else.
        overwrite: Whether a new run replaces a run that lies there. If the new one ends with an error before it has
            trained a batch, the old one is put back.

    Yields:
        A function to call when a batch was trained.

    Raises:
        UserError: Another process holds the lock, or the folder of a new run has other contents.
    """
    if not _first_process():
        yield lambda: None
        return
    previous, locked = os.environ.get(PARENT, ""), (folder / LOCK).exists()
    with held_lock(folder / LOCK, _busy(folder)):
        os.environ[PARENT] = str(os.getpid())  # for the processes that a strategy starts
        try:
            _recover(folder)
            locked |= (folder / "config.yaml").exists()  # a run has its lock
            if new:
                _check_new(folder, overwrite)
            locked = True
            yield partial(_drop_replaced, folder)
            _drop_replaced(folder)
        except BaseException:
            if _is_folder(folder / MOVING):
                _move_back(folder)
            if _is_folder(folder / REPLACED):
                _put_back(folder)
            raise
        finally:
            os.environ[PARENT] = previous
            alone = [path for path in folder.rglob("*") if path.is_file()] == [folder / LOCK]
            if alone or not locked:  # the run did not start
                (folder / LOCK).unlink()
                if new:
                    remove_empty(folder)


def remove_empty(folder: Path) -> None:
    """Remove a folder and those in it, as far as they are empty."""
    for path in (*sorted(folder.rglob("*"), reverse=True), folder):
        with suppress(OSError):
            path.rmdir()


def launched(arguments: list[str]) -> list[str]:
    """The command line as the user typed it, also if DeepSpeed's launcher started this process.

    The launcher prepends `--local_rank=N`, and calls the rank of the node `CROSS_RANK`.
    """
    if "CROSS_RANK" in os.environ and "LOCAL_RANK" in os.environ:
        os.environ.setdefault("NODE_RANK", os.environ["CROSS_RANK"])
        return [argument for argument in arguments if not argument.startswith("--local_rank=")]
    return arguments


def find_run(name: str) -> tuple[Path, Path]:
    """The folder of a run to resume, and its checkpoint to resume from: `last.ckpt`, or else the newest one.

    Args:
        name: A path, a name in `runs/`, or one of the checkpoints of a run.

    Raises:
        UserError: The run does not exist, or has no checkpoint yet.
    """
    file = Path(name).expanduser()
    if file.is_file() and file.suffix == ".ckpt" and file.parent.name == "checkpoints":
        make_folder(run_of(file), "run")
        return run_of(file), file
    for folder in (file, RUNS / name):
        if folder.is_dir():
            make_folder(folder, "run")
            return folder, _newest_checkpoint(_recovered(folder))
    if file.is_file():
        raise UserError(f"resume: {name} is a file; name the run's folder, or start from it by optim.initial_weights")
    by_age = sorted((path for path in RUNS.glob("*") if has_checkpoint(path)), key=lambda path: path.stat().st_mtime)
    recent = f"; the latest is {by_age[-1]}" if by_age else ""
    hint = did_you_mean(file.name, [path.name for path in by_age]) or recent
    raise UserError(f"resume: there is no run {name}{hint}")


def run_of(checkpoint: Path) -> Path:
    """The folder of the run that a checkpoint belongs to; for one that was moved, the folder that it is in."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent


def has_checkpoint(folder: Path) -> bool:
    """Return whether a run has a checkpoint to resume from."""
    return any((folder / "checkpoints").glob("*.ckpt"))


def _newest_checkpoint(folder: Path) -> Path:
    checkpoints = folder / "checkpoints"
    if (last := checkpoints / "last.ckpt").is_file():
        return last
    others = sorted(checkpoints.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    if inner := sorted(path.parent.parent.name for path in folder.glob("*/checkpoints/*.ckpt")):
        raise UserError(f"resume: {folder} is a folder of runs; name one of them, such as {folder / inner[0]}")
    if not others and not any((folder / name).exists() for name in ("config.yaml", "checkpoints", ".lock")):
        raise UserError(f"resume: {folder} is not a run, whose folder has config.yaml and checkpoints/")
    if not others:
        name = folder.name if folder.parent == RUNS else folder
        raise UserError(
            f"resume: the run {folder} has no checkpoint to continue from; start it again, with its config and ",
            Option("run", str(name)),
        )
    log.warning("resume: %s is missing; continuing from %s, the newest of %d", last, others[-1].name, len(others))
    return others[-1]
