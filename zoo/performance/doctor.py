"""`zoo.doctor`: versions, disk and GPU of this machine, and a small model of each mixer against the fp32 loops."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple

import torch
from packaging.requirements import Requirement
from rich.markup import escape
from torch import Tensor

import kernels
import mixers
from kernels import UserError
from kernels.gpu.miscompilations import known_of
from zoo.arguments import first_line
from zoo.config.find import CONFIGS
from zoo.config.parser import parse_model
from zoo.data.text.cache import cache_folder
from zoo.display import new_console, new_table
from zoo.files.atomic import atomic_write
from zoo.files.output import check_record
from zoo.lm.model import LanguageModel
from zoo.performance import model as models
from zoo.train.devices import free_memory, pick_device

Status = Literal["passed", "noted", "failed"]
PRECISIONS = {"cpu": "32-true", "cuda": "bf16-mixed"}  # of training there
LAYERS, HEADS, HEAD_SIZES = 2, 2, {"cpu": 32, "cuda": 64}
GIB = 2**30
LEAST = {"memory": 2 * GIB, "GPU memory": 2 * GIB, "disk": GIB}  # bytes, for the smallest runs and their checkpoints
DISTRIBUTION, TESTED = "token-mixer-zoo", CONFIGS.parent / "constraints.txt"
PROCESSES, LIMIT_S = 16, 300.0  # that compile side by side on a GPU; until which all ops must have ended there
STYLES = {"passed": "green", "noted": "yellow", "failed": "bold red"}


class Finding(NamedTuple):
    """The result of one check, in words and, for JSON, in numbers. What is `noted` is not a failure."""

    subject: str  # packages, GPU, an op …
    check: str  # versions, error …
    status: Status
    says: str
    numbers: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.subject}, {self.check}: {self.says}"


class Examination(NamedTuple):
    """All findings of the doctor about the machine, and about the mixers on a device."""

    device: str
    machine: list[Finding]
    mixers: list[Finding]
    seconds: float

    @property
    def failures(self) -> list[Finding]:
        """The checks that failed."""
        return [each for each in (*self.machine, *self.mixers) if each.status == "failed"]


def doctor(device: str | None = None, output: str | None = None, verbose: bool = True) -> Examination:
    """Check this machine: packages, memory, disk, GPU, and a small model of each mixer against the fp32 loops.

    The loss, its gradients and the logits of decoding are compared, so that each op which training and decoding call
    is checked. On a GPU the models compute in bf16-mixed.

    ``python cli.py doctor``

    Args:
        device: cpu or cuda; null for the GPU if there is one.
        output: A JSON file for all findings.
        verbose: Whether to print tables.

    Raises:
        UserError: The device does not exist, or the file cannot be written.
    """
    if output is not None:
        if Path(output).is_dir():
            raise UserError(f"output: {output} is a folder; name a file, such as doctor.json")
        check_record(Path(output), ("device", "passed", "machine", "mixers"), "output", "the doctor")
    place, start = pick_device(device), monotonic()
    examination = Examination(place.type, [*machine(place)], examine(place), monotonic() - start)
    if output is not None:
        record: dict[str, Any] = {"device": examination.device, "passed": not examination.failures}
        record |= {"seconds": round(examination.seconds, 1), "torch": torch.__version__}
        record |= {name: [each._asdict() for each in getattr(examination, name)] for name in ("machine", "mixers")}
        try:
            with atomic_write(Path(output)) as opened:
                opened.write(json.dumps(record, indent=1).encode())
        except OSError as error:
            raise UserError(f"output: {output} cannot be written: {error.strerror}") from None
    console, findings = new_console(verbose), [*examination.machine, *examination.mixers]
    table = new_table(["subject", "check", "result"], left=3, wrapped=["result"])
    for each in findings:
        table.add_row(each.subject, each.check, f"[{STYLES[each.status]}]{escape(each.says)}[/]")
    console.print(table, "error: of loss, gradients and logits, relative to the fp32 loops")
    for each in examination.failures:
        console.print(f"[{STYLES[each.status]}]failed[/] {escape(str(each))}", highlight=False, soft_wrap=True)
    measured = [each for each in examination.mixers if each.numbers]
    wrong, right = ([{*each.numbers["ops"]} for each in measured if each.status == s] for s in ("failed", "passed"))
    if wrong and (suspects := sorted(set.intersection(*wrong).difference(*right))):
        console.print(f"called by mixers that failed, and by none that passed: {', '.join(suspects)}", soft_wrap=True)
    failed = f"{len(examination.failures)} of {len(findings)} checks failed" if examination.failures else ""
    written = "" if output is None else f"; written to {output}"
    says = f"{failed or f'all {len(findings)} checks passed'}, in {examination.seconds:.0f} s{written}"
    console.print(says, highlight=False, soft_wrap=True)
    return examination


def subjects() -> list[str]:
    """This project's mixers that a language model can have."""
    return [n for n in mixers.names() if (cls := mixers.get(n)).causal and cls.__module__.startswith("mixers.")]


def examine(device: torch.device) -> list[Finding]:
    """Examine all mixers on a device. On a GPU several processes compile, so that a crash or a hang fails only one."""
    names = subjects()
    if device.type != "cuda":
        return [_checked(name, device) for name in names]
    end = monotonic() + LIMIT_S
    with get_context("spawn").Pool(min(PROCESSES, os.cpu_count() or 1), _silence) as pool:
        pending = [pool.apply_async(_checked, (name, device)) for name in names]
        findings = []
        for name, each in zip(names, pending, strict=True):
            try:
                findings.append(each.get(max(0.0, end - monotonic())))
            except TimeoutError:
                says = f"did not finish in {LIMIT_S:.0f} s, or its process died"
                findings.append(Finding(name, "error", "failed", says, {}))
        return findings


def _silence() -> None:
    """Discard what compilers and libraries print in a process of the doctor."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


def _checked(name: str, device: torch.device) -> Finding:
    """The finding about a mixer; an exception is a failure."""
    try:
        return accuracy(name, device)
    except Exception as error:  # of compilers and drivers, of any type
        return Finding(name, "error", "failed", f"{type(error).__name__}: {first_line(error)}", {})


def accuracy(name: str, device: torch.device) -> Finding:
    """Compare loss, gradients and decoded logits of a small model of a mixer with those by the fp32 loops."""
    precision, ran = PRECISIONS[device.type], list[Mapping[str, set[str]]]()

    def here(model: LanguageModel) -> dict[str, Tensor]:
        with kernels.implementations() as implementations:
            results = models.learning(model) | models.continuing(model)
        ran.append(implementations)
        return results

    torch.manual_seed(0)
    size = HEAD_SIZES[device.type]
    config = {"stack": {"class_path": "Uniform", "init_args": {"mixer": name}}, "vocab_size": 256}
    config |= {"num_layers": LAYERS, "hidden_size": HEADS * size, "num_heads": HEADS}
    model = models.conditioned(models.build(parse_model({"model": config}), precision, device))
    gate = models.compared(model, precision, "auto", here, lambda model: models.learning(model) | models.at_once(model))
    # of the first run; in low precision PyTorch's path is a second one
    ops = {op: sorted(backends) for op, backends in sorted(ran[0].items())}
    paths = " + ".join(sorted({backend for backends in ops.values() for backend in backends}, reverse=True))
    says = f"{paths}: " + (f"{max(gate.errors.values()):.0e}" if gate.passed else gate.says)
    numbers = {"ops": ops, "errors": gate.record()["errors"], "limits": gate.limits}
    return Finding(name, "error", "passed" if gate.passed else "failed", says, numbers)


def machine(device: torch.device) -> Iterator[Finding]:
    """Findings about the machine around a device."""
    yield packages()
    yield gpu(device)
    memory = free_memory()
    if memory is not None:
        yield _enough("memory", "free", memory)
    if device.type == "cuda":
        yield _enough("GPU memory", "free", torch.cuda.mem_get_info(device)[0])
    for what, folder in {"runs, in the working folder": Path.cwd(), "data, in the cache": cache_folder()}.items():
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        yield _enough("disk", what, shutil.disk_usage(there).free)


def packages() -> Finding:
    """Check that the packages are those that this project needs, and those that it was tested with."""
    lines = TESTED.read_text().splitlines() if TESTED.is_file() else []
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    tested = {requirement.name: str(requirement.specifier).removeprefix("==") for requirement in pinned}
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
            installed = version(name).split("+")[0]
        except PackageNotFoundError:
            if requirement.specifier:  # without one it was only tested with, perhaps for an extra
                wrong.append(f"{name} is missing ({requirement.specifier} is needed)")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{name} {installed} is installed, and {requirement.specifier} is needed")
        elif name in tested and installed != tested[name]:
            other.append(f"{name} {installed} (tested with {tested[name]})")
        else:
            same.append(name)
    python = ".".join(map(str, sys.version_info[:3]))
    says = f"Python {python}, {len(same)} packages as tested" + f", others not: {', '.join(other)}" * bool(other)
    numbers = {"python": python, "torch": torch.__version__, "wrong": wrong, "untested": other, "tested": same}
    status: Status = "failed" if wrong else "noted" if other else "passed"
    return Finding("packages", "versions", status, "; ".join(wrong) or says, numbers)


def gpu(device: torch.device) -> Finding:
    """Describe the GPU that the ops run on, and what the installed Triton is known to compile wrongly there."""
    if device.type != "cuda":
        here = "there is one, which --device=cuda examines" if torch.cuda.is_available() else "none"
        return Finding("GPU", "device", "noted", f"{here}; ops run in PyTorch on {torch.get_num_threads()} threads", {})
    about, triton = torch.cuda.get_device_properties(device), version("triton")
    capability = f"{about.major}.{about.minor}"
    says = f"{about.name}, {about.total_memory / GIB:.0f} GiB, compute capability {capability}, Triton {triton}"
    if faults := [each.says for each in known_of(triton)]:
        says += f", whose known faults no launch here uses: {'; '.join(faults)}"
    if about.major < 8:
        says += "; it has no units for bf16, so use precision 32-true"
    numbers = {"name": about.name, "bytes": about.total_memory, "capability": capability, "faults": faults}
    return Finding("GPU", "device", "noted" if about.major < 8 else "passed", says, numbers)


def _enough(subject: str, check: str, free: int) -> Finding:
    enough = free >= LEAST[subject]
    says = f"{free / GIB:,.1f} GiB" + ("" if enough else f" is less than {LEAST[subject] / GIB:g} GiB")
    return Finding(subject, check, "passed" if enough else "failed", says, {"bytes": free})
