"""Compiling for the doctor, several processes side by side: one alone takes minutes for kernels of a new machine."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context

import torch

import mixers
from zoo.doctor.layers import examine_layer
from zoo.doctor.ops import examine_case, known_cases

MOST = 8  # processes; each needs half a GiB of the GPU's memory


def compile_ahead(device: torch.device, seen: Callable[[str], None] = lambda name: None) -> int:
    """Examine everything once for what that leaves in the compiler's cache; what is found is not looked at.

    Args:
        device: Where kernels run; anything but a GPU compiles nothing, and is left alone.
        seen: Called with what is done.

    Returns:
        How many ops and mixers were examined. Fewer than there are if a process died: the doctor then finds out why.
    """
    if device.type != "cuda":
        return 0
    workers = max(1, min(MOST, os.cpu_count() or 1))
    seen(f"compiling kernels, {workers} processes")
    return side_by_side(device, workers)


def side_by_side(device: torch.device, workers: int) -> int:
    """Examine everything in several processes; returns how many ops and mixers that were."""
    subjects: list[int | str] = [*range(len(known_cases(device))), *mixers.names()]
    done = 0
    with ProcessPoolExecutor(workers, get_context("spawn"), _silent) as pool:
        try:
            for _ in pool.map(partial(_examine, device), subjects):
                done += 1
        except BrokenProcessPool:
            pass
        finally:  # after Ctrl-C, cancel what has not begun
            pool.shutdown(cancel_futures=True)
    return done


def _silent() -> None:
    """Send what compilers and libraries print nowhere, and the traceback of Ctrl-C."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _examine(device: torch.device, subject: int | str) -> None:
    if isinstance(subject, str):
        list(examine_layer(subject, device))
    else:
        list(examine_case(known_cases(device)[subject], device))
