"""Candidate launch configurations, each checked in a separate process, as a wrong one may crash the GPU context.

`python -m zoo.performance.launch_candidates JSON` checks one candidate or times several, and prints one line of JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels.delta_rule import WHOLE
from kernels.triton import launches
from kernels.triton.launch_file import KERNELS, launch_file
from kernels.triton.miscompilations import miscompiled
from zoo.performance.accuracy import Gate
from zoo.performance.device import DTYPES
from zoo.performance.op_calls import BenchCall, Shape, Tensors
from zoo.performance.timing import as_graph, medians

Entry = dict[str, int]
ROOT = Path(__file__).parents[2]
REPEATS = 20
BLOCKS, WARPS, STAGES = (16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4)
TIMEOUT = 900  # seconds; also a limit on the time to compile
ALONE = "built-in"  # without a launch file


class Target(NamedTuple):
    """A kernel, a head size, and the bytes per element."""

    kernel: str
    size: int
    itemsize: int

    @property
    def dtype(self) -> str:
        return "bf16" if self.itemsize == 2 else "fp32"

    @property
    def says(self) -> str:
        return f"{self.kernel} {self.size} {self.dtype}"


def present(target: Target, device: torch.device) -> Entry | None:
    """The entry in use for a target or, if its heads are cut into pieces, for the pieces; None without one."""
    if target.kernel == "delta_rule.long" and target.size <= WHOLE:
        return None  # such heads do not run on it
    dtype, op = DTYPES[target.dtype], target.kernel.partition(".")[0]
    size = target.size if op == "delta_rule" else min(target.size, launches.largest(op, dtype, device))
    entry = launches.optional(target.kernel, size, dtype, device)
    return None if entry is None else {number: getattr(entry, number) for number in KERNELS[target.kernel]}


def is_cut(target: Target, device: torch.device) -> bool:
    """Return whether heads of this size are cut into pieces."""
    op, dtype = target.kernel.partition(".")[0], DTYPES[target.dtype]
    return op == "linear_recurrence" and target.size > launches.largest(op, dtype, device)


def around(entry: Entry) -> list[Entry]:
    """An entry and its neighbours, which differ in one number: an adjacent block size, or any other warps or stages."""
    entries = [entry]
    for name, value in entry.items():
        others: tuple[int, ...] = {"warps": WARPS, "stages": STAGES}.get(name, ())
        if name in ("block", "keys", "values"):
            others = tuple(block for block in (value // 2, value * 2) if block in BLOCKS)
        entries += [{**entry, name: other} for other in others if other != value]
    return entries


def candidates(target: Target, entry: Entry, shared: int, capability: int) -> list[Entry]:
    """An entry and those of its neighbours that fit, and that no compiler is known to get wrong.

    Args:
        target: The kernel.
        entry: The present entry.
        shared: Bytes of shared memory.
        capability: Major compute capability of the GPU.
    """
    near = [each for each in around(entry) if fits(target, each, shared)]
    return [each for each in near if miscompiled(target.kernel, each, capability) is None]


def fits(target: Target, entry: Entry, shared: int) -> bool:
    """Return whether the tiles of 64 tokens that a pipelined loop holds fit into `shared` bytes of shared memory.

    This is a lower bound, which saves trying hopeless candidates; the compiler decides.
    """
    name = target.kernel.partition(".")[2]
    blocks = sum(entry[axis] for axis in ("block", "keys", "values") if axis in entry)
    if name in ("carry", "local", "forward", "backward", "narrow"):  # these also hold whole keys
        blocks += 2 * target.size
    return name == "step" or (entry["stages"] - 1) * 64 * blocks * target.itemsize <= shared


def cases(target: Target, *, timed: bool) -> Iterator[tuple[str, Shape]]:
    """The calls that run a target's kernel, by op and shape.

    Args:
        target: The kernel, head size and dtype.
        timed: Whether the calls are for timing, or else for checking.
    """
    op, _, name = target.kernel.partition(".")
    D = target.size
    wide = 64 * 128 // D
    if name == "step":
        shapes = [Shape(64, 16, 1, D)]
    elif name == "narrow":  # few recurrences, too short to be cut into segments
        shapes = [Shape(1, 8, 4096 if timed else 1000, D)]
    elif name == "local":  # runs only if sequences are cut into segments
        shapes = [Shape(1, 2, 65536 if timed else 8192, D)]
    elif timed:
        shapes = [Shape(2, wide, 2048, D)]  # fills a device, with memory left for a graph of each candidate
    else:
        shapes = [Shape(4, 64, 200, D), Shape(2, 4, 1000, D)]
        shapes += [Shape(1, 2, 8192, D)] if name in ("carry", "forward", "backward") else []
    ops = {
        "carry": ("head", "channel"),
        "local": ("head", "channel"),
        "step": ("head", "channel"),
        "head_scores": ("head",),
    }
    decays = ops.get(name, ("channel",))
    for case in ["delta_rule"] if op == "delta_rule" else [f"linear_{decay}" for decay in decays]:
        for shape in shapes:
            yield case, shape


def _case(name: str, shape: Shape, target: Target, device: torch.device) -> BenchCall:
    case = BenchCall(name, shape, target.dtype, device, "triton", window=1)
    if shape.T == 1:  # a single step starts from a state
        generator = torch.Generator(device).manual_seed(1)
        size = (shape.B, shape.H, shape.D, shape.D)
        case.inputs["initial_state"] = torch.randn(size, device=device, generator=generator)
    return case


def _results(case: BenchCall, inputs: Tensors, do: torch.Tensor, backend: str | None = None) -> Tensors:
    """The output and, if there is more than one token, the gradients."""
    if case.shape.T > 1:
        return case.differentiated(lambda x: case.call(x, backend), inputs, do)
    with torch.no_grad():
        return {"o": case.call(inputs, backend)}


def check(target: Target, entry: Entry, file: str, device: torch.device) -> str | None:
    """Why a candidate fails: it differs from the chunkwise form in fp32, or does not repeat; None if it passes."""
    with launch_file(file):
        if is_cut(target, device) or present(target, device) != entry:
            return "does not take effect"
        for name, shape in cases(target, timed=False):
            case = _case(name, shape, target, device)
            results = _results(case, case.inputs, case.do)
            exact = {n: x.float() for n, x in case.inputs.items()}
            gate = Gate()
            for key, y in _results(case, exact, case.do.float(), "torch").items():
                gate.check(key, results[key], y, 1e-4 if target.itemsize == 4 else 5e-3 if key == "o" else 1e-2)
            if not gate.passed:
                return f"{name}: {gate.says}"
            for _ in range(REPEATS):
                repeated = _results(case, case.inputs, case.do)
                if not all(torch.equal(repeated[key], x) for key, x in results.items()):
                    return f"{name}: results do not repeat"
    return None


def times(target: Target, files: Mapping[str, str | None], seconds: float, device: torch.device) -> dict[str, float]:
    """Milliseconds of whole calls, forward and backward, with each launch file."""
    total = dict.fromkeys(files, 0.0)
    for name, shape in cases(target, timed=True):
        case = _case(name, shape, target, device)
        graphs = {}
        for key, file in files.items():
            with launch_file(file):
                graphs[key] = as_graph(partial(_results, case, case.inputs, case.do), device)
        for key, ms in medians(graphs, device, seconds).items():
            total[key] += ms
    return total


def run(task: Mapping[str, Any]) -> dict[str, Any]:
    """Perform a task in a separate process: `{"wrong": …}` or `{"ms": …}`, and `{"wrong": …}` if the process died."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "zoo.performance.launch_candidates", json.dumps(task)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT, env={**os.environ, "PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired:
        return {"wrong": f"took longer than {TIMEOUT} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {"wrong": last[:200]}


def perform(task: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Perform a task of `run`, in the separate process."""
    target = Target(*task["target"])
    assert target.kernel in KERNELS
    if "entry" in task:
        return {"wrong": check(target, task["entry"], task["file"], device)}
    return {"ms": times(target, task["files"], task["seconds"], device)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(perform(json.loads(sys.argv[1]), torch.device("cuda"))) + "\n")
