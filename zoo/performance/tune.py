"""The verb `tune`: measure the launch configurations of the Triton kernels on this GPU."""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from kernels import UserError
from kernels.triton.launch_file import KERNELS, NAMES, launch_file
from mixers import did_you_mean
from zoo.files.atomic import atomic_write
from zoo.performance import launch_candidates as candidate
from zoo.performance.device import DTYPES, described
from zoo.performance.launch_candidates import ALONE, Entry, Target

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
        kernels: Any of carry, local, head_scores, channel_scores, channel_grads and step (linear_recurrence), and of
            prepare, forward, backward, dq, dk and narrow (delta_rule), or these ops; all by default.
        sizes: Head sizes; null for 64, 128 and 256.
        dtypes: bf16 or fp32; null for both.
        jobs: Number of candidates checked at a time.
        seconds: Time to spend on each measurement.
        folder: The folder of launch.json.

    Raises:
        UserError: An argument is invalid, or no GPU is available.
    """
    targets = _targets(kernels, sizes, dtypes)
    if jobs < 1:
        raise UserError(f"jobs: expected at least 1, got {jobs}")
    if not torch.cuda.is_available():
        raise UserError("tune: PyTorch finds no CUDA device on this machine, and tuning needs one")
    device = torch.device("cuda")
    tuner = Tuner(device, jobs, seconds, candidate.run)
    with launch_file(None):  # start from the built-in configurations
        tuner.run(targets, Path(folder) / "launch.json")
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 120))
    console.print(table(tuner.trials, torch.cuda.get_device_name(device)))
    file = Path(folder) / "launch.json"
    console.out(f"written to {file}; to use it: {launch_variable(file)} python cli.py …", highlight=False)


def launch_variable(file: Path) -> str:
    """The environment variable, as a prefix of a command, that makes it use a launch file."""
    return f"ZOO_LAUNCH={file}"


class Tuner:
    """Tunes the kernels of an op one after another, each with the best entries of those before it.

    Args:
        device: The GPU.
        jobs: Number of candidates checked at a time.
        seconds: Time to spend on each measurement.
        process: Runs a task in another process.
    """

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
        bar = tqdm(total=len(targets), desc="tune", unit=" kernels", dynamic_ncols=True)
        for op, size, itemsize in groups:
            of_op = [Target(f"{op}.{name}", size, itemsize) for name in NAMES[op]]
            chosen = {t: entry for t in of_op if (entry := candidate.present(t, self.device)) is not None}
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
        trial = Trial(target, candidate.candidates(target, chosen[target], self.shared, self.capability[0]))
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
            cut = candidate.is_cut(trial.target, self.device)
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
    shown = Table(title=device, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("kernel", "candidate", "ms", "", "remark"):
        shown.add_column(column, justify="right" if column == "ms" else "left", no_wrap=column != "remark")
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
    for name in _listed(kernels, list(NAMES)):
        if name not in by_name:
            allowed = ", ".join(each for each in by_name if each not in KERNELS)
            raise UserError(f"kernels: {name!r} is not one of {allowed}{did_you_mean(name, list(by_name))}")
        chosen += by_name[name]
    precisions = _listed(dtypes, ["bf16", "fp32"])
    for dtype in precisions:
        if dtype not in ("bf16", "fp32"):
            raise UserError(f"dtypes: {dtype!r} is not one of bf16, fp32")
    lengths = [64, 128, 256] if sizes is None else sizes
    for size in lengths:
        if size not in (16, 32, 64, 128, 256):
            raise UserError(f"sizes: {size} is not one of 16, 32, 64, 128, 256")
    return [Target(k, s, DTYPES[d].itemsize) for d in precisions for s in lengths for k in dict.fromkeys(chosen)]


def _listed(names: list[str] | str | None, default: list[str]) -> list[str]:
    if names is None:
        return default
    return [name.strip() for name in (names.strip("[]").split(",") if isinstance(names, str) else names)]
