"""Sharded checkpoints: each process writes its tensors to a shard, in a folder next to the `.ckpt` file.

The `.ckpt` is a small file whose entry `shards` names that folder. It is written last and atomically, so that it always
names a complete folder; several files (`last.ckpt`, `best.ckpt`) may name the same one. Here is what ZeRO's and FSDP2's
(`fsdp_shards`) have in common, and ZeRO's. DeepSpeed's converters, which read those, are called here alone; tried with
DeepSpeed 0.19.
"""

import argparse
import contextlib
import copyreg
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

from kernels.errors import Option, UserError
from zoo.files.hashing import file_digest

SHARDS = "shards"
TENSORS = "tensors"  # an entry in `shards` that FSDP2's have (`fsdp_shards`) and ZeRO's have not
_PREFIX = "shards-"
_WRITTEN = re.compile(rf"{_PREFIX}\d{{8,}}(-\d+)?")  # the names of `new_shards`
_FORCED, _FORBIDDEN = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def import_deepspeed(reason: str) -> Any:
    """Import `deepspeed`, which not every system has and which is slow to import; `reason` is for the error."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise its import warns about a missing accelerator
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise UserError(f"DeepSpeed is needed, as {reason}, but cannot be imported: {error}.") from error
    from deepspeed.runtime.zero.config import ZeroStageEnum

    # Python before 3.11.4 writes members of enumerations with `getattr`, which `without_code` refuses
    copyreg.pickle(ZeroStageEnum, lambda member: (type(member), (member.value,)))
    return deepspeed


def new_shards(folder: Path, step: int) -> str:
    """An unused name in `folder` for the shards of a step."""
    name, number = f"{_PREFIX}{step:08d}", 1
    while (folder / name).exists():  # saved again, or left by a killed process
        number += 1
        name = f"{_PREFIX}{step:08d}-{number}"
    return name


def shard_names(folder: Path) -> list[str]:
    """All files in a folder of shards, as relative paths with slashes."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def shard_hashes(folder: Path, names: Sequence[str]) -> dict[str, list[Any]]:
    """File name → its size in bytes and its hash, for some files in a folder of shards."""
    return {name: [(folder / name).stat().st_size, file_digest(folder / name)] for name in names}


def check_entry(path: str | os.PathLike[str], shards: Any) -> None:
    """Raise a UserError unless the entry `shards` of the checkpoint `path` is valid: files in one folder next to it."""
    invalid = UserError(f"{path} is refused: its entry for shards is not as this project writes it.")
    own = {TENSORS} if isinstance(shards, Mapping) and TENSORS in shards else {"stage", "world_size", "parameters"}
    if not isinstance(shards, Mapping) or ({"folder", "files"} | own) - shards.keys():
        raise invalid
    folder, files = shards["folder"], shards["files"]
    if not isinstance(folder, str) or not isinstance(files, Mapping):
        raise invalid
    for name, described in files.items():
        if not isinstance(name, str) or not isinstance(described, list) or [*map(type, described)] != [int, str]:
            raise invalid
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name or ":" in name:
            raise UserError(f"{path} is refused: its shard {name} is not in a folder next to it.")
    if not folder.startswith(_PREFIX) or PurePosixPath(folder).name != folder or "\\" in folder:
        raise UserError(f"{path} is refused: {folder} is not a folder of shards next to it.")


def check_shards(path: str | os.PathLike[str], shards: Mapping[str, Any], part: tuple[int, int] = (0, 1)) -> None:
    """Check that a checkpoint's shards are exactly the files that were written; a UserError names one that is not.

    Args:
        path: The checkpoint.
        shards: Its entry `shards`, checked by `check_entry`.
        part: (i, n): verify the hashes of the i-th of n parts of the files only, so that n processes share the work.
    """
    folder = Path(path).parent / shards["folder"]
    if not folder.is_dir():
        raise UserError(f"{path} has its weights in the folder {folder}, which is missing.")
    if extra := set(shard_names(folder)) - shards["files"].keys():
        raise UserError(f"{path} is refused: {folder / min(extra)} is not one of its shards.")
    for number, (name, (size, written)) in enumerate(sorted(shards["files"].items())):
        file = folder / name
        if not file.is_file():
            raise UserError(f"{path} is incomplete: {file} is missing.")
        if not file.resolve().is_relative_to(Path(path).parent.resolve()):
            raise UserError(f"{path} is refused: {file} is a link that leaves its folder.")
        if (current := file.stat().st_size) != size:
            raise UserError(f"{path} is damaged: {file} has {current} bytes, but was written with {size}.")
        if number % part[1] == part[0] and file_digest(file) != written:
            raise UserError(f"{path} is damaged: {file} does not have the bytes that were written.")


@contextlib.contextmanager
def without_code() -> Iterator[None]:
    """Inside the block, DeepSpeed unpickles files without running code in them.

    It passes `weights_only=False` to `torch.load`, which only PyTorch's environment variable can override.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    previous = {name: os.environ.pop(name, None) for name in (_FORCED, _FORBIDDEN)}
    os.environ[_FORCED] = "1"
    try:
        # plain data classes, the only ones in its shards apart from tensors
        with torch.serialization.safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        del os.environ[_FORCED]
        os.environ.update({name: value for name, value in previous.items() if value is not None})


def unreadable(path: str | os.PathLike[str], error: Exception) -> UserError:
    """The error to raise for ZeRO shards that cannot be read, or that would run code."""
    if match := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return UserError(f"{path} is refused: its shards name {match[1]}, which does not belong in weights.")
    return UserError(f"the shards of {path} cannot be read: {' '.join(str(error).split())}")


def divided_alike(path: str | os.PathLike[str], checkpoint: Mapping[str, Any], stage: int, world_size: int) -> bool:
    """Return whether a run of a ZeRO stage and number of processes can load a checkpoint's shards without resharding.

    A UserError if the run cannot resume from it at all.
    """
    weights = ("a new run can start from its weights: ", Option("optim.initial_weights", str(path)))
    if (shards := checkpoint.get(SHARDS)) is None or TENSORS in shards:
        raise UserError(
            f"{path} was not saved by ZeRO; continue it with the strategy that it was saved with, or ", *weights
        )
    if (shards["stage"], shards["world_size"]) == (stage, world_size):
        return True
    if 3 in (shards["stage"], stage):
        raise UserError(
            f"{path} is of ZeRO {shards['stage']} with {shards['world_size']} processes, and cannot be continued by "
            f"ZeRO {stage} with {world_size}, as only stages 1 and 2 can be resharded; ",
            *weights,
        )
    return False


def remove_unused_shards(folder: Path) -> None:
    """Remove shards that no checkpoint in the folder names any more."""
    used = set()
    for path in folder.glob("*.ckpt"):
        try:
            contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            used.add(contents[SHARDS]["folder"])
        except KeyError:
            continue  # a checkpoint in one file
        except Exception:
            return  # an unreadable checkpoint may name any of them
    for shards in folder.glob(f"{_PREFIX}*"):
        written = _WRITTEN.fullmatch(shards.name) and shards.is_dir() and not shards.is_symlink()
        if written and shards.name not in used:
            shutil.rmtree(shards, ignore_errors=True)


@contextlib.contextmanager
def undivided(path: str | os.PathLike[str], shards: Mapping[str, Any]) -> Iterator[Path]:
    """A temporary folder with the contents of a checkpoint of ZeRO 1 or 2, parameter by parameter, inside the block.

    It is DeepSpeed's universal format: `zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt` and `zero/optimizer_state.pt`. The disk
    must have room for a second copy. A UserError if shards are missing or damaged, or the disk is full.
    """
    check_shards(path, shards)
    import_deepspeed(f"{path} was saved by it")
    from deepspeed.checkpoint.ds_to_universal import main

    folder = Path(path).parent / f".{shards['folder']}-undivided"
    if folder.is_symlink():
        raise UserError(f"{path} cannot be resharded: {folder} is a link, through which nothing is written.")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
    folders = {"input_folder": str(Path(path).parent / shards["folder"]), "output_folder": str(folder)}
    settings = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    try:
        try:
            with _silent(), without_code():
                main(argparse.Namespace(**folders, **settings, inject_missing_state=True))
        except OSError as error:
            raise UserError(f"{path} cannot be resharded in its folder: {error}") from error
        except pickle.UnpicklingError as error:
            raise unreadable(path, error) from error
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress the output of DeepSpeed's converters."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def whole_weights(path: str | os.PathLike[str], shards: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights of a sharded checkpoint by their names in the LightningModule, assembled in fp32 on the CPU.

    A UserError if shards are missing or damaged, or DeepSpeed is not installed.
    """
    check_shards(path, shards)
    import_deepspeed(f"{path} was saved by it")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with _silent(), without_code():
        try:
            return get_fp32_state_dict_from_zero_checkpoint(str(Path(path).parent), tag=shards["folder"])
        except Exception as error:  # pickle and DeepSpeed raise many types for damaged files
            raise unreadable(path, error) from error
