"""The folder of a run: how it is named, made once, and found again to be continued."""

import os
import time
from pathlib import Path

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback

from kernels import UserError

from .config import write
from .data.tokenizer import Tokenizer

RUNS = Path("runs")
# Processes that a launcher starts for other devices inherit the name that the first one chose.
_INHERITED = "ZOO_RUN"


def new_run(name: str | None, config: str) -> Path:
    """Make the folder of a new run: `runs/NAME`, or `runs/CONFIG-TIME` without a name.

    Args:
        name: A name in `runs/`, or a path if it has a slash.
        config: Name of the config.

    Raises:
        UserError: The folder holds something already, or cannot be written.
    """
    inherited = os.environ.get(_INHERITED)
    if inherited and int(os.environ.get("LOCAL_RANK", "0")) > 0:
        return Path(inherited)
    # processes of one job on several nodes agree on its number, not on the clock
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    automatic = f"{config}-{job or time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(name) if name and "/" in name else RUNS / (name or automatic)
    first = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) == 0
    number = 1
    while first and not name and not job and folder.exists():  # another run started in the same second
        number += 1
        folder = RUNS / f"{automatic}-{number}"
    if first and any(path.is_file() for path in folder.rglob("*")):
        raise UserError(f"run: {folder} exists already; continue it with --resume {folder}, or choose another --run")
    make_folder(folder)
    os.environ[_INHERITED] = str(folder)
    return folder


def launched(arguments: list[str]) -> list[str]:
    """The command line as it was typed, when DeepSpeed's launcher started this process.

    It puts `--local_rank=N` before everything, and has a name of its own for the number of the node.
    """
    if "CROSS_RANK" in os.environ and "LOCAL_RANK" in os.environ:
        os.environ.setdefault("NODE_RANK", os.environ["CROSS_RANK"])
        return [argument for argument in arguments if not argument.startswith("--local_rank=")]
    return arguments


class RunFiles(Callback):
    """Writes what a run is made of to its folder, `config.yaml` and, of text, `tokenizer.json`.

    It waits until all of it has loaded, so that a start that fails leaves the folder as it was.

    Args:
        folder: The run's folder.
        config: The resolved config.
        tokenizer: The tokenizer of the data; None for data that is no text.
    """

    def __init__(self, folder: Path, config: Namespace, tokenizer: Tokenizer | None) -> None:
        self.folder, self.config, self.tokenizer = folder, config, tokenizer

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write them, in the first process."""
        if trainer.is_global_zero:
            write(self.config, self.folder / "config.yaml")
            if self.tokenizer is not None:
                self.tokenizer.save(self.folder / "tokenizer.json")


def make_folder(folder: Path) -> None:
    """Make a folder that can be written.

    Raises:
        UserError: It cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run: the folder {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UserError(f"run: the folder {folder} cannot be written to")


def find_run(name: str) -> Path:
    """The folder of a run to continue, given as a path or as a name in `runs/`.

    Raises:
        UserError: There is no such run, or it has no checkpoint yet.
    """
    for folder in (Path(name), RUNS / name):
        if folder.is_dir():
            if not (folder / "checkpoints" / "last.ckpt").is_file():
                raise UserError(f"resume: the run {folder} has no checkpoint (checkpoints/last.ckpt) to continue from")
            make_folder(folder)
            return folder
    if Path(name).is_file():
        raise UserError(f"resume: {name} is a file; name the run's folder, or start from it by optim.initial_weights")
    known = sorted((path for path in RUNS.glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    recent = f"; the latest is {known[-1]}" if known else ""
    raise UserError(f"resume: there is no run {name}{recent}")
