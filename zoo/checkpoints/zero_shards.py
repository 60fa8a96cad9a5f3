"""Checkpoints whose tensors lie in a folder beside them, a part from each process: what DeepSpeed writes.

The `.ckpt` is a small file like any other, which says under `shards` where its tensors are. It is written last and all
at once, so that it names a complete folder or is not there; and it may have several names (`last.ckpt`, `best.ckpt`).
"""

import argparse
import contextlib
import importlib
import io
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from kernels.errors import UserError
from zoo.checkpoints.archive import check_archive
from zoo.files.hashing import file_digest

SHARDS = "shards"
_PREFIX = "shards-"
_FORCED, _FORBIDDEN = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def import_deepspeed(reason: str) -> Any:
    """The package `deepspeed`, which is not there on every system and slow to import.

    Raises:
        UserError: It cannot be imported; `reason` says what it is needed for.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else its import warns that there is nothing else
    try:
        return importlib.import_module("deepspeed")
    except ImportError as error:
        raise UserError(f"DeepSpeed is needed, as {reason}, but cannot be imported: {error}.") from error


def new_shards(folder: Path, step: int) -> str:
    """A name in `folder` that is not taken, for the shards of a step."""
    name, number = f"{_PREFIX}{step:08d}", 1
    while (folder / name).exists():  # saved again, or left by a process that was killed
        number += 1
        name = f"{_PREFIX}{step:08d}-{number}"
    return name


def shard_names(folder: Path) -> list[str]:
    """All files of a folder of shards, as paths from there on, with slashes."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def shard_hashes(folder: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """File → its bytes and its hash, of some files of a folder of shards."""
    return {name: [(folder / name).stat().st_size, file_digest(folder / name)] for name in names}


def sync(folder: Path) -> None:
    """Wait until the disk has all files of a folder of shards."""
    for path in [*folder.rglob("*"), folder]:
        if os.name == "nt" and path.is_dir():
            continue  # Windows has no such call for folders
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_entry(path: str | os.PathLike[str], shards: Any) -> None:
    """Raise a UserError unless the entry `shards` of the checkpoint `path` names files in one folder beside it."""
    wrong = UserError(f"{path} is refused: what it says of its shards is not what this project writes.")
    if not isinstance(shards, Mapping) or {"folder", "files", "stage", "world_size", "parameters"} - shards.keys():
        raise wrong
    folder, files = shards["folder"], shards["files"]
    if not isinstance(folder, str) or not isinstance(files, Mapping):
        raise wrong
    for name, described in files.items():
        of_format_2 = isinstance(described, list) and [type(part) for part in described] == [int, str]
        if not isinstance(name, str) or not (isinstance(described, int) or of_format_2):
            raise wrong
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name or ":" in name:
            raise UserError(f"{path} is refused: its shard {name} is not in a folder beside it.")
    if not folder.startswith(_PREFIX) or PurePosixPath(folder).name != folder or "\\" in folder:
        raise UserError(f"{path} is refused: {folder} is no folder of shards beside it.")


def check_shards(path: str | os.PathLike[str], shards: Mapping[str, Any], part: tuple[int, int] = (0, 1)) -> None:
    """Raise a UserError unless the files of a checkpoint's shards are those that were written, and no others.

    Args:
        path: The checkpoint.
        shards: Its entry `shards`, which `check_entry` has seen.
        part: (i, n): compare the hashes of the i-th of n parts of the files only; n processes share the work so.
    """
    folder = Path(path).parent / shards["folder"]
    if not folder.is_dir():
        raise UserError(f"{path} has its weights in the folder {folder}, which is missing.")
    if surplus := set(shard_names(folder)) - shards["files"].keys():
        raise UserError(f"{path} is refused: {folder / min(surplus)} is none of its shards.")
    for number, (name, described) in enumerate(sorted(shards["files"].items())):
        size, written = (described, None) if isinstance(described, int) else described  # format 1 has the size only
        file = folder / name
        if not file.is_file():
            raise UserError(f"{path} is incomplete: {file} is missing.")
        if not file.resolve().is_relative_to(Path(path).parent.resolve()):
            raise UserError(f"{path} is refused: {file} is a link that leaves its folder.")
        if (found := file.stat().st_size) != size:
            raise UserError(f"{path} is damaged: {file} has {found} bytes, but was written with {size}.")
        if number % part[1] == part[0]:
            if written is not None and file_digest(file) != written:
                raise UserError(f"{path} is damaged: {file} does not have the bytes that were written.")
            check_archive(file, contents=written is None)


@contextlib.contextmanager
def without_code() -> Iterator[None]:
    """Inside the `with` block DeepSpeed, which loads its files with all that pickle can do, runs no code in them.

    It says `weights_only=False` in each of its calls, over which only PyTorch's own environment variable prevails.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = {name: os.environ.pop(name, None) for name in (_FORCED, _FORBIDDEN)}
    os.environ[_FORCED] = "1"
    try:
        # plain data, each of them: that is all that its shards hold besides tensors
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def unreadable(path: str | os.PathLike[str], error: Exception) -> UserError:
    """What to say of shards that cannot be read, or that would run code."""
    if called := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return UserError(f"{path} is refused: its shards name {called[1]}, which is no part of any weights.")
    return UserError(f"the shards of {path} cannot be read: {' '.join(str(error).split())}")


def divided_alike(path: str | os.PathLike[str], checkpoint: Mapping[str, Any], stage: int, world_size: int) -> bool:
    """Whether so many processes can continue a checkpoint as it is, rather than after it was divided anew.

    Args:
        path: The checkpoint.
        checkpoint: What is in it.
        stage: ZeRO's, 1 to 3, of the run that continues.
        world_size: Processes of the run that continues.

    Raises:
        UserError: They cannot continue it at all.
    """
    weights = f"a new run can start from its weights: --optim.initial_weights={path}"
    if (shards := checkpoint.get(SHARDS)) is None:
        raise UserError(
            f"{path} was not saved by ZeRO; continue it with the strategy that it was saved with, or {weights}"
        )
    if (shards["stage"], shards["world_size"]) == (stage, world_size):
        return True
    if 3 in (shards["stage"], stage):
        raise UserError(
            f"{path} is of ZeRO {shards['stage']} with {shards['world_size']} processes, and cannot be continued by "
            f"ZeRO {stage} with {world_size}, as only stages 1 and 2 can be divided anew; {weights}"
        )
    return False


def remove_unused_shards(folder: Path) -> None:
    """Remove the shards in a folder of checkpoints that none of them names any more."""
    used = set()
    for path in folder.glob("*.ckpt"):
        try:
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            used.add(contents[SHARDS]["folder"])
        except KeyError:
            continue  # a checkpoint in one file
        except Exception:
            return  # a file that cannot be read may name any of them
    for shards in folder.glob(f"{_PREFIX}*"):
        if shards.is_dir() and shards.name not in used:
            shutil.rmtree(shards, ignore_errors=True)


@contextlib.contextmanager
def undivided(path: str | os.PathLike[str], shards: Mapping[str, Any]) -> Iterator[Path]:
    """A folder that holds a sharded checkpoint parameter by parameter, for as long as the `with` block lasts.

    It is DeepSpeed's universal format: `zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt` and `zero/optimizer_state.pt`.

    Args:
        path: The checkpoint, whose folder must have room for it once more.
        shards: Its entry `shards`; of stage 1 or 2.

    Raises:
        UserError: Shards are missing or damaged, or there is no room.
    """
    check_shards(path, shards)
    import_deepspeed(f"{path} was saved by it")
    from deepspeed.checkpoint.ds_to_universal import main

    folder = Path(path).parent / f".{shards['folder']}-undivided"
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    what = {"input_folder": str(Path(path).parent / shards["folder"]), "output_folder": str(folder)}
    how = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    try:
        try:
            with _silent(), without_code():
                main(argparse.Namespace(**what, **how, inject_missing_state=True))
        except OSError as error:
            raise UserError(f"{path} cannot be divided anew in its folder: {error}") from error
        except pickle.UnpicklingError as error:
            raise unreadable(path, error) from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """DeepSpeed's converters print a lot."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def whole_weights(path: str | os.PathLike[str], shards: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a sharded checkpoint, put together in fp32 on the CPU.

    Args:
        path: The checkpoint.
        shards: Its entry `shards`.

    Returns:
        Name of a parameter or buffer in the LightningModule → tensor.

    Raises:
        UserError: Shards are missing or damaged, or there is no DeepSpeed here to read them.
    """
    check_shards(path, shards)
    import_deepspeed(f"{path} was saved by it")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with _silent(), without_code():
        try:
            return get_fp32_state_dict_from_zero_checkpoint(str(Path(path).parent), tag=shards["folder"])
        except Exception as error:  # whatever pickle and DeepSpeed make of a damaged file
            raise unreadable(path, error) from error
