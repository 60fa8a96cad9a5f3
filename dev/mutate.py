"""Check that the tests notice faults: apply small changes to the code, one at a time, and run the tests that must fail.

    python dev/mutate.py --jobs 2
    python dev/mutate.py --only hgrn1

`mutations.toml` lists the changes, each with the few tests that must notice it. mutmut and cosmic-ray change every
operator and run many tests for each change. Here that would take days, much of it for changes that mean nothing
(another message, another default). They cannot be given a list, and their operators do not include the faults that
matter in kernels and training: a missing scale, a dropped mask, an fsync left out, a gate applied before instead of
after. So this list is written by hand, and a change costs seconds.

Each change is made in a copy of the tracked files, so the working tree is never touched. The tests run on the CPU,
Triton kernels under the interpreter. Processes are forked from one that has imported the third-party packages.
"""

import argparse
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from compileall import compile_dir
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "dev" / "mutations.toml"
PRELOADED = ["torch", "numpy", "scipy.optimize", "pytest", "lightning", "torchmetrics", "triton", "jsonargparse"]
PACKAGES = ("kernels", "mixers", "zoo", "tests")
REQUIRED = 95  # percent of the mutations that must be killed
TIME_LIMIT = 900  # seconds for the tests of one mutation
KILLED, SURVIVED, TIMED_OUT, BROKEN = "killed", "survived", "time limit", "not applicable"


@dataclass(frozen=True)
class Mutation:
    """A small change of the code.

    Attributes:
        file: The file to change, relative to the root.
        before: Text that occurs exactly once in it.
        after: Its replacement.
        tests: Arguments of pytest that select the tests that must fail.
        why: The fault, in a few words.
    """

    file: str
    before: str
    after: str
    tests: str
    why: str

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"

    def problem(self, root: Path = ROOT) -> str | None:
        """Why this mutation does not apply to the files under `root`; None if it does."""
        if not (root / self.file).is_file():
            return f"{self.file} does not exist"
        if (count := (root / self.file).read_text(encoding="utf-8").count(self.before)) != 1:
            return f"`before` occurs {count} times in {self.file}"
        if self.before == self.after:
            return "`after` is `before`"
        missing = [name for name in self.test_files() if not (root / name).exists()]
        return f"{missing[0]} does not exist" if missing else None

    def test_files(self) -> list[str]:
        """The test files that `tests` names."""
        return [part.partition("::")[0] for part in shlex.split(self.tests) if part.startswith("tests/")]

    def applied(self, root: Path = ROOT) -> str:
        """The changed text of the file."""
        return (root / self.file).read_text(encoding="utf-8").replace(self.before, self.after)


class Result(NamedTuple):
    """The outcome of one mutation; `seconds` is the processor time of its tests."""

    outcome: str
    seconds: float
    detail: str = ""


def mutations(path: Path = LIST) -> list[Mutation]:
    """Read the list."""
    with open(path, "rb") as file:
        return [Mutation(**entry) for entry in tomllib.load(file)["mutation"]]


def copy_tracked(folder: Path) -> None:
    """Copy the tracked files as they are now, with bytecode that is checked by content and not by time."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for package in PACKAGES:
        compile_dir(folder / package, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def run_pytest(folder: str, tests: str, log: str, answer: Connection) -> None:
    """Be a process that runs tests in `folder`, and send pytest's exit code and the processor time."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    if loaded := [name for name in (*PACKAGES, "cli") if name in sys.modules]:
        raise RuntimeError(f"{loaded[0]} was imported before it could be changed")
    os.chdir(folder)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry not in ("", str(ROOT), str(ROOT / "dev")))]
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "ZOO_CACHE": cache}
        import pytest

        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "", *shlex.split(tests)])
    answer.send((int(code), sum(os.times()[:4])))


def run_tests(folder: Path, tests: str, log: Path) -> tuple[int | None, float]:
    """Exit code of pytest, None at the time limit, and the processor time."""
    context = multiprocessing.get_context("forkserver")
    read, write = context.Pipe(duplex=False)
    process = context.Process(target=run_pytest, args=(str(folder), tests, str(log), write))
    process.start()
    write.close()
    assert process.pid is not None
    try:
        if read.poll(TIME_LIMIT):
            outcome = read.recv()
            process.join(10)
            return outcome
    except EOFError:  # a crash
        process.join()
        return process.exitcode, 0.0
    finally:
        with suppress(ProcessLookupError):  # with what its tests have started
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        read.close()
    return None, float(TIME_LIMIT)


def check(mutation: Mutation, folder: Path) -> Result:
    """Apply a mutation in a copy, run its tests, and take it back."""
    if problem := mutation.problem(folder):
        return Result(BROKEN, 0.0, problem)
    path, log = folder / mutation.file, folder / "pytest.log"
    original = path.read_bytes()
    path.write_text(mutation.applied(folder), encoding="utf-8")
    try:
        code, seconds = run_tests(folder, mutation.tests, log)
    finally:
        path.write_bytes(original)
    if code == 0:
        return Result(SURVIVED, seconds)
    if code == 1:
        return Result(KILLED, seconds, first_failure(log))
    if code is None:
        return Result(TIMED_OUT, seconds)
    return Result(BROKEN, seconds, f"pytest ended with {code}: {last_line(log)}")


def check_passing(tests: str, folder: Path) -> Result:
    """Run tests without a mutation: they must pass, or their failure would prove nothing."""
    log = folder / "pytest.log"
    code, seconds = run_tests(folder, tests, log)
    detail = f"fails without any mutation ({code}): {first_failure(log) if code == 1 else last_line(log)}"
    return Result("passed", seconds) if code == 0 else Result(BROKEN, seconds, detail)


def first_failure(log: Path) -> str:
    """The name of the test that failed first."""
    lines = log.read_text(errors="replace").splitlines()
    failed = [line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].removeprefix("tests/") if failed else last_line(log)


def last_line(log: Path) -> str:
    """The last line of a log."""
    return (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]


def check_all(chosen: Sequence[Mutation], jobs: int) -> Iterator[tuple[Mutation | str, Result]]:
    """Yield the outcome of every selection of tests without a mutation, and of every mutation, as they end."""
    with tempfile.TemporaryDirectory() as scratch:
        copies: SimpleQueue[Path] = SimpleQueue()
        first = Path(scratch, "0")
        copy_tracked(first)
        for number in range(1, jobs):
            shutil.copytree(first, Path(scratch, str(number)))
        for number in range(jobs):
            copies.put(Path(scratch, str(number)))

        def run(work: Mutation | str) -> Result:
            folder = copies.get()
            try:
                return check_passing(work, folder) if isinstance(work, str) else check(work, folder)
            finally:
                copies.put(folder)

        with ThreadPoolExecutor(jobs) as pool:
            distinct = dict.fromkeys(mutation.tests for mutation in chosen)
            running = {pool.submit(run, work): work for work in (*distinct, *chosen)}
            try:
                for future in as_completed(running):
                    yield running[future], future.result()
            finally:
                pool.shutdown(cancel_futures=True)


def main() -> int:
    """Run the command line; the exit code is 0 if enough mutations were killed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the processes that it started
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time")
    parser.add_argument("--only", metavar="TEXT", help="only mutations whose file or reason contains this")
    parser.add_argument("--list", action="store_true", help="print the list and stop")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the outcomes to a JSON file")
    args = parser.parse_args()
    console = Console()
    chosen = [mutation for mutation in mutations() if not args.only or args.only in str(mutation)]
    if not chosen:
        parser.error(f"argument --only: no mutation contains {args.only!r}")
    if args.list:
        for mutation in chosen:
            console.print(str(mutation), highlight=False, markup=False, soft_wrap=True)
        return 0
    # on the CPU wherever this runs; one thread, as tensors are tiny
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    results: dict[Mutation, Result] = {}
    failing: dict[str, Result] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("mutations", total=len(chosen) + len({mutation.tests for mutation in chosen}))
        for work, result in check_all(chosen, args.jobs):
            progress.advance(task)
            if isinstance(work, Mutation):
                results[work] = result
            elif result.outcome == BROKEN:
                failing[work] = result
            results |= {mutation: failing[mutation.tests] for mutation in results if mutation.tests in failing}
            if args.output:  # also of what an interruption leaves
                rows = [asdict(mutation) | results[mutation]._asdict() for mutation in chosen if mutation in results]
                args.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    report(console, {mutation: results[mutation] for mutation in chosen})
    outcomes = [result.outcome for result in results.values()]
    killed = outcomes.count(KILLED) + outcomes.count(TIMED_OUT)
    percent = 100 * killed / len(chosen)
    console.print(f"{killed} of {len(chosen)} mutations killed ({percent:.0f} %)", highlight=False)
    return int(percent < REQUIRED or BROKEN in outcomes)


def report(console: Console, results: dict[Mutation, Result]) -> None:
    """Print a table of all outcomes."""
    table = Table("mutation", "outcome", "CPU s", "first failure, or reason")
    colours = {KILLED: "green", TIMED_OUT: "yellow"}
    for mutation, (outcome, seconds, detail) in results.items():
        colour = colours.get(outcome, "red")
        table.add_row(str(mutation), f"[{colour}]{outcome}[/]", f"{seconds:.1f}", detail.replace("[", r"\["))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
