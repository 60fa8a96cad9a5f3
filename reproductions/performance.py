"""Measure the tables of GPUs in docs/performance.md: CSV files whose rows name card, versions, date and commit.

    python reproductions/performance.py
    python reproductions/performance.py --parts=[kernels/delta_rule,loss] --seconds=500
    python reproductions/performance.py --tiny=true --device=cpu --folder=runs/performance-tiny

A part consists of jobs. Each job is a command in a process of its own, which checks results before it times them. Its
rows are written to FOLDER/jobs/PART-JOB.csv, its output to a .log next to them, and a job whose rows exist is not
measured again. FOLDER/performance_PART.csv has the rows of all jobs of a part. To use several GPUs of one machine at a
time, start the script for each of them with some of the parts (`CUDA_VISIBLE_DEVICES`).
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from kernels import UserError
from reproductions import write_csv
from zoo.arguments import check_names
from zoo.config.command_line import arguments_of
from zoo.train.devices import pick_device

ROOT = Path(__file__).resolve().parents[1]
MODEL = ("--config", "gated_deltanet.yaml", "--config", "size/400m.yaml")
TINY = tuple(f"--model.{key}" for key in ("vocab_size=32", "num_layers=2", "hidden_size=16", "num_heads=2"))
STEP = ("--batch_size=8", "--length=4096", "--precision=bf16-true")
SMALL_STEP = ("--batch_size=1", "--length=20", "--steps=1")
RECURRENCES = ("delta_rule", "linear_head", "linear_channel", "linear_constant")
# B, value heads, T and key heads of the delta rule next to FlashQLA, whose heads have 128 channels
FLASHQLA = (
    (4, 8, 4096, 8),
    (4, 64, 4096, 64),
    (1, 8, 65536, 8),
    (1, 64, 8192, 64),
    (8, 64, 4096, 64),
    (2, 64, 8192, 16),
)
ATTENTION = "[[8,8,4096,128],[4,16,2048,64],[2,16,8192,128],[1,16,32768,128]]"
ALL_TOKENS = 1 << 20  # a window that hides nothing
BESIDE = "reproductions/beside.py"
Row = dict[str, Any]


class Job(NamedTuple):
    """Some rows of a part.

    Attributes:
        part: The part.
        name: Name of the job in its part.
        arguments: A script that writes a bench.json to `--folder`, and its arguments.
    """

    part: str
    name: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.part}/{self.name}"


def jobs(tiny: bool, peers: bool) -> Iterator[Job]:
    """Return all jobs in the order in which they are measured. Those that compile for minutes come last.

    Args:
        tiny: Whether sizes are small, to try the commands.
        peers: Whether other libraries than PyTorch are timed, which need a GPU.
    """
    model = (*MODEL[:2], *TINY) if tiny else MODEL
    step = SMALL_STEP if tiny else STEP
    yield Job("loss", "vocabulary", ("reproductions/vocabulary_loss.py", *(["--tokens=64", "--vocab_size=99"] * tiny)))
    full = _kernels("window_attention", ATTENTION, tiny, "--libraries=[sdpa,cudnn]", f"--window_size={ALL_TOKENS}")
    yield Job("attention", "full", full)
    yield Job("attention", "window", _kernels("window_attention", None, tiny, "--libraries=[flex_attention]"))
    training = ("cli.py", "bench", "training", *model, *step)
    yield Job("training", "default", training)
    if not tiny:
        yield Job("training", "captured", (*training, "--cuda_graph=true"))
        yield Job("training", "kept", (*training, "--model.recompute=false"))
    decode = ("cli.py", "bench", "decode", *model, f"--positions=[{8 if tiny else 1024}]", "--batch_sizes=[1,64]")
    decode += ("--seconds=0.02",) if tiny else ("--precision=bf16-true",)
    yield Job("decode", "ours", decode)
    expansion = ("reproductions/bench.py", "expansion", "--long_head=false", *step)
    expansion += () if tiny else ("--cuda_graph=true",)  # the default of fit; the ratios do not depend on the host
    for mixer in ("gated_deltanet", "gla"):
        of_mixer = ("--config", f"{mixer}.yaml", *TINY) if tiny else (f"--mixers=[{mixer}]",)
        factors = "[2,4]" if mixer == "gla" else "[2,4,8]"  # GLA at E = 8 needs more than 80 GB; see below
        yield Job("expansion", mixer, (*expansion, *of_mixer, f"--factors={factors}"))
    for mixer in ("gated_deltanet", "gla"):
        of_mixer = ("--config", f"state_expansion/{mixer}.yaml", *(TINY if tiny else ("--config", "size/400m.yaml")))
        recomputing = ("--model.stack.mixer.recompute=states", "--factors=[8]")
        yield Job("expansion", f"{mixer}_recompute_states", (*expansion, *of_mixer, *recomputing))
    for op in RECURRENCES:
        yield Job("kernels", op, _kernels(op, None, tiny, *["--libraries=[fla]"] * peers))
    for B, H, T, G in FLASHQLA:
        options = (*["--libraries=[flash_qla]"] * peers, f"--key_heads={2 if tiny else G}")
        yield Job("flashqla", f"{B}x{H}x{T}", _kernels("delta_rule", f"[[{B},{H},{T},128]]", tiny, *options))
    if peers:
        yield Job("training", "fla", (BESIDE, *training[2:]))
        yield Job("training", "captured_beside_fla", (BESIDE, *training[2:], "--cuda_graph=true"))
        yield Job("decode", "fla", (BESIDE, *decode[2:]))


def _kernels(op: str, shapes: str | None, tiny: bool, *options: str) -> tuple[str, ...]:
    """The command for an op, next to other libraries if options name them; null for its usual shapes."""
    shapes = "[[1,2,40,8]]" if tiny else shapes
    sizes = () if shapes is None else (f"--shapes={shapes}",)
    program = (BESIDE,) if any(option.startswith("--libraries") for option in options) else ("cli.py", "bench")
    return (*program, "kernels", f"--ops=[{op}]", *sizes, *options, *["--seconds=0.02"] * tiny)


def performance(
    parts: list[str] | None = None,
    tiny: bool = False,
    device: str | None = None,
    seconds: float | None = None,
    commit: str | None = None,
    folder: str | None = None,
) -> list[str]:
    """Measure parts of docs/performance.md, and write a CSV for each.

    Args:
        parts: Of loss, attention, training, decode, expansion, kernels and flashqla, or single jobs, such as
            kernels/delta_rule; null for all. Kernels and jobs with fla in their names need flash-linear-attention,
            flashqla needs FlashQLA.
        tiny: Whether to use small sizes, to try the commands on any machine; other libraries are left out.
        device: cpu or cuda; null for the GPU if available.
        seconds: Time limit for all jobs; one that is running then is stopped, and its rows are lost. Null for none.
        commit: Version of the project; null for the one that git reports.
        folder: The folder to write to; null for runs/performance, or runs/performance-tiny.

    Returns:
        The jobs that failed.

    Raises:
        UserError: An argument is invalid.
    """
    end = None if seconds is None else time.monotonic() + seconds
    where, target = pick_device(device), Path(folder or ("runs/performance-tiny" if tiny else "runs/performance"))
    if where.type != "cuda" and not tiny:
        raise UserError("device: the sizes of the page need a GPU; try the commands with --tiny=true")
    every = [*jobs(tiny, peers=where.type == "cuda" and not tiny)]
    check_names("parts", parts or [], [*dict.fromkeys(job.part for job in every), *map(str, every)])
    if target.exists() and not target.is_dir():
        raise UserError(f"folder: {target} is a file")
    for file in (target / "jobs").glob("*.csv"):
        if any((row["tiny"] == "True") != tiny for row in write_csv.read(file)):
            raise UserError(f"folder: {target} has rows of {'the full' if tiny else 'tiny'} sizes; choose another one")
    stamp = {"date": date.today().isoformat(), "commit": commit or _commit(), "tiny": tiny}
    failed = []
    chosen = [job for job in every if parts is None or {job.part, str(job)} & {*parts}]
    # other processes may write the tables of other parts
    tables = {
        part: [job.name for job in every if job.part == part] for part in dict.fromkeys(job.part for job in chosen)
    }
    for job in chosen:
        file = target / "jobs" / f"{job.part}-{job.name}.csv"
        if file.exists():
            continue
        try:
            rows = _bench(job, file, where.type, end)
        except _NotMeasuredError as error:
            failed.append(f"{job}: {error}")
            _say(failed[-1])
            continue
        about = {"part": job.part, "job": job.name, **stamp, "note": None}  # a table has all of these columns
        write_csv.write([about | row for row in rows], file)
        _say(f"{job}: {len(rows)} rows")
        _merge(target, tables)
    _merge(target, tables)
    return failed


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


def _merge(folder: Path, tables: Mapping[str, Sequence[str]]) -> None:
    """Write the table of each part that has rows; `tables` has the names of its jobs."""
    for part, names in tables.items():
        rows = [row for name in names for row in write_csv.read(folder / "jobs" / f"{part}-{name}.csv")]
        if rows:
            write_csv.write(rows, folder / f"performance_{part}.csv")


class _NotMeasuredError(Exception):
    """A job has no rows; the message says why."""


def _bench(job: Job, file: Path, device: str, end: float | None) -> list[Row]:
    """Run a benchmark and return its rows. Each has passed its check, or says why it was not measured."""
    with tempfile.TemporaryDirectory() as folder:
        status = _run([*job.arguments, f"--device={device}", f"--folder={folder}"], file.with_suffix(".log"), end)
        record = Path(folder) / "bench.json"
        if not record.exists():
            raise _NotMeasuredError(f"ended with {status}; see {file.with_suffix('.log')}")
        rows = [*write_csv.benchmark(record)]
    if status:
        reason = "a result was wrong" if status == 1 else f"ended with {status}"
        raise _NotMeasuredError(f"{reason}; see {file.with_suffix('.log')}")
    return rows


def _run(arguments: Sequence[str], log: Path, end: float | None, variables: Row | None = None) -> int:
    """Run a Python process, append what it prints to a file, and return its exit status."""
    left = None if end is None else end - time.monotonic()
    if left is not None and left <= 0:
        raise _NotMeasuredError("no time was left")
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | (variables or {})
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"{' '.join(arguments)}\n")
        stream.flush()
        try:
            return subprocess.run(
                [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=stream, stderr=stream, timeout=left
            ).returncode
        except subprocess.TimeoutExpired:
            raise _NotMeasuredError("stopped, as its time was over") from None


def _commit() -> str:
    """Return the version of the project, with + if files differ from it."""
    try:
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        raise UserError("commit: git does not report one here; set it with --commit=…") from None
    return head.stdout.strip() + "+" * bool(changed.stdout.strip())


def main(arguments: list[str]) -> int:
    """Run the command line; return 1 if a job failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which also ends the running job
    _, options = arguments_of(performance, arguments, "performance")
    return int(bool(performance(**options)))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the rows of finished jobs are kept\n")
        sys.exit(128 + signal.SIGINT)
