"""The machine: packages, GPU, free memory and disk."""

import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from kernels.gpu.launch_table import TABLE
from kernels.gpu.miscompilations import known_of, miscompiled
from zoo.config.find import CONFIGS
from zoo.data.text.cache import cache_folder
from zoo.performance.doctor.checks import Finding, as_finding
from zoo.train.devices import free_memory

GIB = 2**30
LEAST = {"memory": 2 * GIB, "GPU memory": 2 * GIB, "disk": GIB}  # bytes, for the smallest runs and their checkpoints
DISTRIBUTION = "token-mixer-zoo"
TESTED = CONFIGS.parent / "constraints.txt"


def machine(device: torch.device) -> Iterator[Finding]:
    """Findings about the machine around a device."""
    yield packages()
    yield gpu(device)
    yield compiler()
    yield from space(device)


def packages() -> Finding:
    """Check that the packages are those that this project needs, and those that it was tested with."""
    tested = dict(_pinned())
    try:
        needed = [Requirement(line) for line in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:  # run from a checkout
        needed = [Requirement(name) for name in tested]
    wrong, other, same = [], [], []
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name
        try:
            installed = version(name)
        except PackageNotFoundError:
            if requirement.specifier:  # without one it was only tested with, perhaps for an extra
                wrong.append(f"{name} is missing ({requirement.specifier} is needed)")
            continue
        if not requirement.specifier.contains(installed.split("+")[0], prereleases=True):
            wrong.append(f"{name} {installed} is installed, and {requirement.specifier} is needed")
        elif name in tested and installed.split("+")[0] != tested[name]:
            other.append(f"{name} {installed} (tested with {tested[name]})")
        else:
            same.append(name)
    python = ".".join(map(str, sys.version_info[:3]))
    numbers = {"python": python, "torch": torch.__version__, "wrong": wrong, "untested": other, "tested": same}
    if wrong:
        return Finding("packages", "versions", "failed", "; ".join(wrong), numbers)
    if other:
        says = f"Python {python}, {len(same)} as tested, others not: {', '.join(other)}"
        return Finding("packages", "versions", "noted", says, numbers)
    return Finding("packages", "versions", "passed", f"Python {python}, {len(same)} packages as tested", numbers)


def _pinned() -> Iterator[tuple[str, str]]:
    """The packages of constraints.txt, with their versions."""
    for line in TESTED.read_text().splitlines() if TESTED.is_file() else []:
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            yield requirement.name, str(requirement.specifier).removeprefix("==")


def gpu(device: torch.device) -> Finding:
    """Describe the GPU that the ops run on."""
    if device.type != "cuda":
        here = "there is one, which --device=cuda examines" if torch.cuda.is_available() else "none"
        threads = torch.get_num_threads()
        says = f"{here}; ops run in PyTorch on {threads} thread{'s' * (threads > 1)}"
        return Finding("GPU", "device", "noted", says, {"threads": threads})
    about = torch.cuda.get_device_properties(device)
    capability = f"{about.major}.{about.minor}"
    says = (
        f"{about.name}, {about.total_memory / GIB:.0f} GiB, compute capability {capability}, CUDA {torch.version.cuda}"
    )
    numbers = {"name": about.name, "bytes": about.total_memory, "capability": capability, "cuda": torch.version.cuda}
    if about.major < 8:
        return Finding("GPU", "device", "noted", f"{says}; it has no units for bf16, so use precision 32-true", numbers)
    return Finding("GPU", "device", "passed", says, numbers)


def compiler() -> Finding:
    """Report what the installed version of Triton is known to compile wrongly, and whether a launch here has it."""
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return Finding("Triton", "miscompilations", "noted", "not installed; ops run in PyTorch", {"version": None})
    faults = [each.says for each in known_of(installed)]
    met = [
        f"{kernel} {size}"
        for kernel, entries in TABLE.items()
        for (capability, size, _), entry in entries.items()
        if miscompiled(kernel, entry._asdict(), capability) is not None
    ]
    numbers = {"version": installed, "known": faults, "met": met}
    if met:
        return Finding("Triton", "miscompilations", "failed", f"{installed}: launches of {', '.join(met)}", numbers)
    if not faults:
        return Finding("Triton", "miscompilations", "passed", f"{installed}: none is known", numbers)
    says = f"{installed}: known on Hopper are {len(faults)}: {'; '.join(faults)}. No launch here uses them"
    return Finding("Triton", "miscompilations", "passed", says, numbers)


def space(device: torch.device) -> Iterator[Finding]:
    """Free memory of the machine and the GPU, and free disk where runs and prepared data go."""
    memory = free_memory()
    if memory is not None:
        yield _enough("memory", "free", memory, LEAST["memory"])
    if device.type == "cuda":
        yield _enough("GPU memory", "free", torch.cuda.mem_get_info(device)[0], LEAST["GPU memory"])
    folders = {"runs, in the working folder": Path.cwd(), "data, in the cache": cache_folder()}
    for what, folder in folders.items():
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        yield _enough("disk", what, shutil.disk_usage(there).free, LEAST["disk"])


def _enough(subject: str, check: str, free: int, least: int) -> Finding:
    enough = free >= least
    says = f"{free / GIB:,.1f} GiB" + ("" if enough else f" is less than {least / GIB:g} GiB")
    return as_finding(subject, check, enough, says, bytes=free)
