"""Measure the launch configurations near the present one of a kernel, on this GPU.

    python -m dev.tune delta_rule.dq 128 bf16

Each candidate differs from the entry of `kernels/gpu/launches.csv` in one number. It runs in a process of its own, as a
wrong launch may crash the GPU context: its outputs and gradients are compared with the chunkwise form in fp32, must
repeat bitwise, and are timed. The best row is printed; add it to the table by hand, and run `pytest -m gpu
tests/kernels`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels.gpu import launch_table, plan
from kernels.gpu.device import capability
from kernels.gpu.launch_table import TABLE, LaunchConfig
from kernels.gpu.miscompilations import miscompiled
from zoo.performance.accuracy import Gate
from zoo.performance.bench_calls import BenchCall, Shape, Tensors
from zoo.performance.device import DTYPES
from zoo.performance.timing import as_graph, medians

ROOT = Path(__file__).parents[1]
REPEATS = 20
BLOCKS, WARPS, STAGES = (16, 32, 64, 128), (2, 4, 8), (1, 2, 3, 4)
SECONDS, TIMEOUT = 1.0, 900.0  # of each measurement; of a process, most of which may be compilation
GAIN = 0.97  # the best candidate is proposed if its time is at most this fraction of the present one


class Target(NamedTuple):
    """A kernel, a head size, and the bytes per element."""

    kernel: str
    size: int
    itemsize: int

    @property
    def dtype(self) -> str:
        return "bf16" if self.itemsize == 2 else "fp32"


def present(target: Target, device: torch.device) -> LaunchConfig | None:
    """The entry that serves heads of this size; None if they do not run on the kernel, or are cut into pieces."""
    return launch_table.optional(target.kernel, target.size, DTYPES[target.dtype], device)


def use(target: Target, entry: LaunchConfig, device: torch.device) -> None:
    """Launch the kernel with this entry for the rest of the process."""
    TABLE[target.kernel][capability(device), target.size, target.itemsize] = entry
    for cached in (launch_table._entry, launch_table._largest, plan.of_rows):
        cached.cache_clear()


def candidates(target: Target, entry: LaunchConfig, shared: int, architecture: int) -> list[LaunchConfig]:
    """An entry and its neighbours that fit into `shared` bytes, and that no compiler is known to get wrong.

    Neighbours have an adjacent block size, or any other number of warps or stages.
    """
    near = [entry]
    for name, value in entry._asdict().items():
        others: tuple[int, ...] = {"warps": WARPS, "stages": STAGES}.get(name, ())
        if not others:
            others = tuple(block for block in (value // 2, value * 2) if block in BLOCKS)
        near += [entry._replace(**{name: other}) for other in others if other != value]
    right = [each for each in near if miscompiled(target.kernel, each._asdict(), architecture) is None]
    return [each for each in right if fits(target, each, shared)]


def fits(target: Target, entry: LaunchConfig, shared: int) -> bool:
    """Return whether the tiles of 64 tokens that a pipelined loop holds fit into `shared` bytes of shared memory.

    This is a lower bound, which saves trying hopeless candidates; the compiler decides.
    """
    name = target.kernel.partition(".")[2]
    blocks = entry.block + entry.keys + entry.values
    if name in ("carry", "local", "forward", "backward", "narrow"):  # these also hold whole keys
        blocks += 2 * target.size
    return name == "step" or (entry.stages - 1) * 64 * blocks * target.itemsize <= shared


def cases(target: Target, *, timed: bool) -> Iterator[tuple[str, Shape]]:
    """The calls that run a target's kernel, by op and shape, for timing or else for checking."""
    op, _, name = target.kernel.partition(".")
    D = target.size
    if name == "step":
        shapes = [Shape(64, 16, 1, D)]
    elif name == "narrow":  # few recurrences, too short to be cut into segments
        shapes = [Shape(1, 8, 4096 if timed else 1000, D)]
    elif name == "local":  # runs only if sequences are cut into segments
        shapes = [Shape(1, 2, 65536 if timed else 8192, D)]
    elif timed:
        shapes = [Shape(2, 64 * 128 // D, 2048, D)]  # fills a device
    else:
        shapes = [Shape(4, 64, 200, D), Shape(2, 4, 1000, D)]
        shapes += [Shape(1, 2, 8192, D)] if name in ("carry", "forward", "backward") else []
    if op == "linear_recurrence":
        decays = {"head_scores": ["head"], "channel_scores": ["channel"], "channel_grads": ["channel"]}
        ops = [f"linear_{decay}" for decay in decays.get(name, ["head", "channel"])]
    elif op in ("delta_rule", "window_attention"):
        ops = ["forgetting_attention" if op == "window_attention" else op]
    else:
        ops = ["kda"] * (not name.startswith("scalar")) + ["comba"] * (name not in ("prepare", "gradients"))
    return ((each, shape) for each in ops for shape in shapes)


def _case(name: str, shape: Shape, target: Target, device: torch.device) -> BenchCall:
    backend = "torch" if name == "forgetting_attention" else "triton"  # attention chooses among its kernels in `torch`
    case = BenchCall(name, shape, target.dtype, device, backend, window=1)
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


def fault(case: BenchCall, itemsize: int) -> str | None:
    """Why a call is wrong: it differs from the chunkwise form in fp32, or does not repeat; None if it is right."""
    results = _results(case, case.inputs, case.do)
    exact = {n: x.float() for n, x in case.inputs.items()}
    gate = Gate()
    for key, y in _results(case, exact, case.do.float(), "torch").items():
        gate.check(key, results[key], y, 1e-4 if itemsize == 4 else 5e-3 if key == "o" else 1e-2)
    if not gate.passed:
        return f"{case.name}: {gate.says}"
    for _ in range(REPEATS):
        repeated = _results(case, case.inputs, case.do)
        if not all(torch.equal(repeated[key], x) for key, x in results.items()):
            return f"{case.name}: results do not repeat"
    return None


def measured(target: Target, entry: LaunchConfig, device: torch.device) -> dict[str, Any]:
    """Check and time an entry: `{"ms": …}` of whole calls, forward and backward, or `{"wrong": …}`."""
    use(target, entry, device)
    for name, shape in cases(target, timed=False):
        if wrong := fault(_case(name, shape, target, device), target.itemsize):
            return {"wrong": wrong}
    ms = 0.0
    for name, shape in cases(target, timed=True):
        case = _case(name, shape, target, device)
        ms += medians({name: as_graph(partial(_results, case, case.inputs, case.do), device)}, device, SECONDS)[name]
    return {"ms": ms}


def in_process(target: Target, entry: LaunchConfig) -> dict[str, Any]:
    """The result of `measured` in a separate process; `{"wrong": …}` if the process died."""
    command = [sys.executable, "-m", "dev.tune", "--measure", json.dumps([target, entry])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"wrong": f"took longer than {TIMEOUT:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    return {"wrong": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]}


def main(arguments: list[str]) -> None:
    device = torch.device("cuda")
    if arguments[:1] == ["--measure"]:
        parts = json.loads(arguments[1])
        sys.stdout.write(json.dumps(measured(Target(*parts[0]), LaunchConfig(*parts[1]), device)) + "\n")
        return
    if len(arguments) != 3 or arguments[0] not in TABLE or not arguments[1].isdigit() or arguments[2] not in DTYPES:
        sys.exit(f"usage: python -m dev.tune KERNEL SIZE bf16|fp32\nkernels: {', '.join(TABLE)}")
    if not torch.cuda.is_available():
        sys.exit("error: PyTorch finds no CUDA device on this machine")
    target = Target(arguments[0], int(arguments[1]), DTYPES[arguments[2]].itemsize)
    entry, architecture = present(target, device), capability(device)
    if entry is None:
        sys.exit(f"error: heads of {target.size} do not run on {target.kernel}, or are cut into pieces")
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    times: dict[LaunchConfig, float] = {}
    for each in candidates(target, entry, shared, architecture):
        result = in_process(target, each)
        if "ms" in result:
            times[each] = result["ms"]
        numbers = ", ".join(f"{name} {value}" for name, value in each._asdict().items())
        sys.stdout.write(f"{numbers}: {result}\n")
        sys.stdout.flush()
    if not times:
        sys.exit("error: no candidate is right")
    best = min(times, key=times.__getitem__)
    if entry in times and times[best] > GAIN * times[entry]:
        best = entry
    row = target.kernel, architecture, target.size, target.itemsize, *best, ""
    sys.stdout.write(f"best: {','.join(map(str, row))}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
