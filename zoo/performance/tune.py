"""The verb `tune`: measure the launch configurations of the Triton kernels on this GPU.

Each candidate is checked in a separate process, as a wrong one may crash the GPU context: `python -m
zoo.performance.tune JSON` checks one candidate or times several, and prints one line of JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from kernels import UserError
from kernels.delta_rule import WHOLE
from kernels.gpu import launch_table
from kernels.gpu.launch_file import KERNELS, NAMES, launch_file
from kernels.gpu.miscompilations import miscompiled
from mixers import did_you_mean
from zoo.arguments import check_above_0, check_names, names_in
from zoo.display import new_console, new_table, progress_bar
from zoo.files.atomic import atomic_write
from zoo.files.output import check_record
from zoo.performance.accuracy import Gate
from zoo.performance.bench_calls import BenchCall, Shape
from zoo.performance.device import DTYPES, described
from zoo.performance.op_calls import Tensors
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
    size = min(target.size, launch_table.largest(op, dtype, device)) if op == "linear_recurrence" else target.size
    entry = launch_table.optional(target.kernel, size, dtype, device)
    return None if entry is None else {number: getattr(entry, number) for number in KERNELS[target.kernel]}


def is_cut(target: Target, device: torch.device) -> bool:
    """Return whether heads of this size are cut into pieces."""
    op, dtype = target.kernel.partition(".")[0], DTYPES[target.dtype]
    return op == "linear_recurrence" and target.size > launch_table.largest(op, dtype, device)


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
    """An entry and those of its neighbours that fit into `shared` bytes, and that no compiler is known to get wrong."""
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
    """The calls that run a target's kernel, by op and shape, for timing or else for checking."""
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
    per_channel, per_head = (
        ["kda"] * (not name.startswith("scalar")),
        ["comba"] * (name not in ("prepare", "gradients")),
    )
    rows = {"delta_rule": ["delta_rule"], "general_delta_rule": per_channel + per_head}
    for case in rows.get(op) or [f"linear_{decay}" for decay in decays]:
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


def in_process(task: Mapping[str, Any]) -> dict[str, Any]:
    """Perform a task in a separate process: `{"wrong": …}` or `{"ms": …}`, and `{"wrong": …}` if the process died."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "zoo.performance.tune", json.dumps(task)]
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
    """Perform a task of `in_process`, in the separate process."""
    target = Target(*task["target"])
    assert target.kernel in KERNELS
    if "entry" in task:
        return {"wrong": check(target, task["entry"], task["file"], device)}
    return {"ms": times(target, task["files"], task["seconds"], device)}


GAIN = 0.97  # a candidate replaces the present entry if its time is at most this fraction
TaskRunner = Callable[[Mapping[str, Any]], dict[str, Any]]


@dataclass
class Trial:
    """All candidates of one kernel.

    Args:
        target: The kernel, head size and dtype.
        entries: The candidate launch configurations; the first is the present one.
        wrong: Number of a candidate → why it was rejected.
        ms: Number of a candidate → milliseconds of a whole call, forward and backward; under `ALONE`, those without a
            launch file.
    """

    target: Target
    entries: list[Entry]
    wrong: dict[int, str] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)

    @property
    def best(self) -> int | None:
        """The number of the proposed entry: the present one, unless another is clearly faster; None without times."""
        timed = {int(key): ms for key, ms in self.ms.items() if key != ALONE}
        if not timed:
            return None
        fastest = min(timed, key=timed.__getitem__)
        return fastest if 0 not in timed or timed[fastest] <= GAIN * timed[0] else 0

    @property
    def gains(self) -> bool:
        """Return whether the proposal is at least as fast as the built-in launch configurations."""
        return self.best is not None and self.ms[str(self.best)] <= self.ms.get(ALONE, float("inf"))


def tune(
    kernels: list[str] | str | None = None,
    sizes: list[int] | None = None,
    dtypes: list[str] | str | None = None,
    jobs: int = 4,
    seconds: float = 1.0,
    folder: str = "runs/tune",
) -> None:
    """Measure launch configurations of the Triton kernels on this GPU, and write the best ones to a file.

    Candidates are neighbours of the present configurations. Each is checked in a separate process: its outputs and
    gradients against an fp32 reference, and its results for repeatability. Those that pass are timed. The file takes
    effect only if the environment variable ZOO_LAUNCH names it.

    Args:
        kernels: Any of carry, local, head_scores, channel_scores, channel_grads and step (linear_recurrence), of
            prepare, forward, backward, dq, dk, long and narrow (delta_rule), and of prepare, forward, backward, narrow,
            pairs and gradients (general_delta_rule), or these ops, or an op and a kernel, as in delta_rule.dq; all by
            default.
        sizes: Head sizes; null for 64, 128 and 256.
        dtypes: bf16 or fp32; null for both.
        jobs: Number of candidates checked at a time.
        seconds: Time to spend on each measurement.
        folder: The folder of launch.json.

    Raises:
        UserError: An argument is invalid, no GPU is available, or launch.json is not a file of this function.
    """
    targets = _targets(kernels, sizes, dtypes)
    if jobs < 1:
        raise UserError(f"jobs: expected at least 1, got {jobs}")
    check_above_0("seconds", seconds)
    if not torch.cuda.is_available():
        raise UserError("tune: PyTorch finds no CUDA device on this machine, and tuning needs one")
    file = Path(folder) / "launch.json"
    check_record(file, ("capability", "entries", "measured"), "folder", "tune")
    device = torch.device("cuda")
    tuner = Tuner(device, jobs, seconds, in_process)
    with launch_file(None):  # start from the built-in configurations
        tuner.run(targets, file)
    console = new_console()
    console.print(table(tuner.trials, torch.cuda.get_device_name(device)))
    console.out(f"written to {file}; to use it: ZOO_LAUNCH={file} python cli.py …", highlight=False)


class Tuner:
    """Tunes the kernels of an op one after another, each with the best entries of those before it."""

    def __init__(self, device: torch.device, jobs: int, seconds: float, process: TaskRunner):
        self.device, self.jobs, self.seconds, self.process = device, jobs, seconds, process
        self.about = described(device)
        self.capability = torch.cuda.get_device_capability(device)
        properties = torch.cuda.get_device_properties(device)
        self.shared = getattr(properties, "shared_memory_per_block_optin", 1 << 30)  # bytes; no limit if unknown
        self.trials: list[Trial] = []

    def run(self, targets: Iterable[Target], file: Path) -> None:
        """Tune all targets, and write the results so far after each of them."""
        targets = list(targets)
        groups = list(dict.fromkeys((t.kernel.partition(".")[0], t.size, t.itemsize) for t in targets))
        bar = progress_bar(total=len(targets), desc="tune", unit=" kernels")
        for op, size, itemsize in groups:
            of_op = [Target(f"{op}.{name}", size, itemsize) for name in NAMES[op]]
            chosen = {t: entry for t in of_op if (entry := present(t, self.device)) is not None}
            for target in of_op:
                if target not in targets:
                    continue
                bar.set_postfix_str(target.says)
                if target in chosen:
                    trial = self.try_all(target, chosen)
                    self.trials.append(trial)
                    if trial.best is not None:
                        chosen[target] = trial.entries[trial.best]
                self.write(file)
                bar.update()
        bar.close()

    def try_all(self, target: Target, chosen: Mapping[Target, Entry]) -> Trial:
        """Check all candidates of a target, then time those that passed, with `chosen` for the other kernels."""
        trial = Trial(target, candidates(target, chosen[target], self.shared, self.capability[0]))
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for number, entry in enumerate(trial.entries):
                files.append(str(Path(folder) / f"{number}.json"))
                Path(files[-1]).write_text(json.dumps(self.content({**chosen, target: entry})), encoding="utf-8")
            tasks = [{"target": target, "entry": e, "file": f} for e, f in zip(trial.entries, files, strict=True)]
            with ThreadPoolExecutor(self.jobs) as pool:
                for number, outcome in enumerate(pool.map(self.process, tasks)):
                    if outcome["wrong"] is not None:
                        trial.wrong[number] = outcome["wrong"]
            good: dict[str, str | None] = {str(n): f for n, f in enumerate(files) if n not in trial.wrong}
            if good:
                good[ALONE] = None
                outcome = self.process({"target": target, "files": good, "seconds": self.seconds})
                trial.ms = outcome.get("ms", {})
                if "ms" not in outcome:
                    trial.wrong.update({int(n): f"timing: {outcome['wrong']}" for n in good if n != ALONE})
        return trial

    def content(self, entries: Mapping[Target, Entry]) -> dict[str, Any]:
        """The content of a launch file for this GPU."""
        return {"capability": self.capability, "entries": [{**t._asdict(), **entry} for t, entry in entries.items()]}

    def proposed(self) -> dict[Target, Entry]:
        """The best entries. For heads that are cut into pieces now, only if every kernel gains without the cut."""
        best = {}
        for trial in self.trials:
            group = [t for t in self.trials if _group(t.target) == _group(trial.target)]
            cut = is_cut(trial.target, self.device)
            whole = {t.target.kernel.partition(".")[2] for t in group} == {
                *NAMES[trial.target.kernel.partition(".")[0]]
            }
            if trial.best is not None and (not cut or (whole and all(t.gains for t in group))):
                best[trial.target] = trial.entries[trial.best]
        return best

    def write(self, file: Path) -> None:
        """Write the proposed entries and all measurements."""
        measured = [{**trial.target._asdict(), "rows": rows(trial)} for trial in self.trials]
        record = {**self.about, **self.content(self.proposed()), "measured": measured}
        with atomic_write(file) as opened:
            opened.write(json.dumps(record, indent=1, allow_nan=False).encode())


def rows(trial: Trial) -> list[dict[str, Any]]:
    """The candidates of a trial with their results."""
    return [
        {
            **entry,
            "ms": trial.ms.get(str(number)),
            "wrong": trial.wrong.get(number),
            "present": number == 0,
            "proposed": number == trial.best,
        }
        for number, entry in enumerate(trial.entries)
    ]


def table(trials: Iterable[Trial], device: str) -> Table:
    """A table of all candidates for the terminal."""
    left = ["kernel", "candidate", "", "remark"]
    shown = new_table(["kernel", "candidate", "ms", "", "remark"], left, wrapped=["remark"], title=device)
    for trial in trials:
        for number, row in enumerate(rows(trial)):
            entry = " ".join(f"{name} {value}" for name, value in trial.entries[number].items() if value)
            marks = ", ".join(name for name in ("present", "proposed") if row[name])
            ms = "–" if row["ms"] is None else f"{row['ms']:.3f}"
            head = "" if number else trial.target.says
            shown.add_row(head, entry, ms, marks, row["wrong"] or "", style="red" if row["wrong"] else None)
        if ALONE in trial.ms:
            shown.add_row("", ALONE, f"{trial.ms[ALONE]:.3f}")
    return shown


def _group(target: Target) -> tuple[str, int, int]:
    return target.kernel.partition(".")[0], target.size, target.itemsize


def _targets(kernels: list[str] | str | None, sizes: list[int] | None, dtypes: list[str] | str | None) -> list[Target]:
    """The targets of `tune`'s arguments."""
    by_name: dict[str, list[str]] = {op: [] for op in NAMES}  # op, kernel (which two ops may share), or op.kernel
    for kernel in KERNELS:
        op, _, name = kernel.partition(".")
        for alias in (op, name, kernel):
            by_name.setdefault(alias, []).append(kernel)
    chosen = []
    for name in list(NAMES) if kernels is None else names_in(kernels) or [""]:
        if name not in by_name:
            allowed = ", ".join(each for each in by_name if each not in KERNELS)
            raise UserError(f"kernels: {name!r} is not one of {allowed}{did_you_mean(name, list(by_name))}")
        chosen += by_name[name]
    precisions = ["bf16", "fp32"] if dtypes is None else names_in(dtypes)
    check_names("dtypes", precisions or [""], ["bf16", "fp32"])
    head_sizes = [64, 128, 256] if sizes is None else sizes
    for size in head_sizes:
        if size not in (16, 32, 64, 128, 256):
            raise UserError(f"sizes: {size} is not one of 16, 32, 64, 128, 256")
    return [Target(k, s, DTYPES[d].itemsize) for d in precisions for s in head_sizes for k in dict.fromkeys(chosen)]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(perform(json.loads(sys.argv[1]), torch.device("cuda"))) + "\n")
