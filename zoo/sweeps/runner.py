"""Runs in processes of their own: several at a time, the finished skipped, the stopped continued."""

import json
import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

from kernels import UserError
from zoo.config.serialise import differences, to_dict
from zoo.files.sealed_json import read_sealed, write_sealed
from zoo.runs.folder import LOCK, has_checkpoint
from zoo.sweeps.plan import Run
from zoo.train.results import read_row
from zoo.train.signals import PARENT, sigterm_raises

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
GRACE_SECONDS = 120.0  # in which a run of an earlier sweep, that ends with it, must have saved


class Failure(NamedTuple):
    """A run that did not complete."""

    run: str
    reason: str


class _Process(NamedTuple):
    run: Run
    process: "subprocess.Popen[bytes]"
    log: IO[bytes]
    slot: int


class Runner:
    """Trains runs with `command`, `jobs` at a time, each in `folder/NAME` with its terminal in `folder/NAME.log`.

    The same call again skips what is complete, continues what has a checkpoint, and starts the rest anew. Ctrl-C or
    SIGTERM stops the running ones as it stops `fit`: each leaves a checkpoint.

    Args:
        command: How to start the command line, such as `["python", "cli.py"]`.
        folder: Where the runs go.
        jobs: Runs at a time; null for one on each GPU, or one on a machine without. More than there are GPUs share
            them; the processor's cores are divided between the jobs.

    Raises:
        UserError: `jobs` is no positive number.
    """

    def __init__(self, command: Sequence[str], folder: Path, jobs: int | None = None):
        self.gpus = torch.cuda.device_count()
        self.command, self.folder, self.jobs = list(command), folder, max(self.gpus, 1) if jobs is None else jobs
        if self.jobs < 1:
            raise UserError(f"jobs: {jobs} must be at least 1")

    def run(self, runs: Sequence[Run]) -> list[Failure]:
        """Run what is not complete; returns what failed, when all the others are complete.

        Raises:
            UserError: The folder holds runs of the same names with other configs, or is in use.
        """
        with self.claimed(runs):
            waiting = deque(run for run in runs if result(self.folder / run.name) is None)
            running: list[_Process] = []
            failures: list[Failure] = []
            slots = set(range(self.jobs))
            done = len(runs) - len(waiting)
            with (
                tqdm(total=len(runs), initial=done, desc="runs", unit=" runs", dynamic_ncols=True) as bar,
                sigterm_raises(),
            ):
                try:
                    while waiting or running:
                        while waiting and slots:
                            running.append(self._start(waiting.popleft(), slots.pop()))
                        time.sleep(POLL_SECONDS)
                        for one in [one for one in running if one.process.poll() is not None]:
                            running.remove(one)
                            slots.add(one.slot)
                            one.log.close()
                            failures += self._failure(one.run, one.process.returncode)
                            bar.set_postfix_str(f"{len(failures)} failed" if failures else "", refresh=False)
                            bar.update()
                finally:
                    _stop(running)
        return failures

    def prepare(self, run: Run) -> list[str]:
        """The command line of a run: it starts, or goes on from its last checkpoint.

        A run that a killed sweep has left may still be saving; it is waited for.

        Raises:
            UserError: Another process trains it, and does not end.
        """
        folder = self.folder / run.name
        if (folder / LOCK).exists():
            try:
                with FileLock(folder / LOCK).acquire(timeout=GRACE_SECONDS):
                    pass
            except Timeout:
                raise UserError(f"folder: {folder} is being trained by another process; wait for it") from None
        if has_checkpoint(folder):
            return [*self.command, "fit", "--resume", str(folder)]
        return [*self.command, "fit", *run.arguments(), "--run", f"{self.folder}/{run.name}"]

    def _start(self, run: Run, slot: int) -> _Process:
        threads = max((os.cpu_count() or 1) // self.jobs, 1)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), PARENT: str(os.getpid())}
        environment.pop("ZOO_RUN", None)
        if self.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.gpus)))
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot % self.gpus]
        output = (self.folder / f"{run.name}.log").open("ab")
        # a session of its own: Ctrl-C reaches it through us alone, once
        process = subprocess.Popen(
            self.prepare(run),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
        return _Process(run, process, output, slot)

    def _failure(self, run: Run, code: int) -> list[Failure]:
        if code == 0 and result(self.folder / run.name) is not None:
            return []
        reason = f"exit code {code}" if code else "no result"
        return [Failure(run.name, f"{reason}, see {self.folder / run.name}.log")]

    @contextmanager
    def claimed(self, runs: Sequence[Run]) -> Iterator[None]:
        """The folder for ourselves, after a check that it holds no other runs by these names."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"folder: {self.folder} is in use by another sweep; wait for it or choose another"
            ) from None
        try:
            self._check(runs)
            yield
        finally:
            lock.release()

    def _check(self, runs: Sequence[Run]) -> None:
        file = self.folder / "runs.json"
        advice = "delete it, and the runs there count as runs of this sweep"
        known = read_sealed(file, required=False, advice=advice) if file.is_file() else {}
        for run in runs:
            plain = json.loads(json.dumps(to_dict(run.read())))
            # keys that did not exist when the run was started are no difference
            before = known.setdefault(run.name, plain)
            if not isinstance(before, dict):
                raise UserError(f"{file} is damaged ({run.name} has no config); {advice}.")
            old = {**plain, **before}
            if old != plain and (self.folder / run.name).exists():
                key, before, now = next(differences(old, plain))
                raise UserError(
                    f"folder: {self.folder / run.name} is a run with {key}: {before}, and now it is {now}; choose "
                    "another --folder, or delete that one"
                )
            known[run.name] = plain
        write_sealed(file, known)


def result(run: Path) -> dict[str, Any] | None:
    """The results row of a complete run; None for any other, and for one that is damaged, which is written anew."""
    try:
        row = read_row(run)
    except UserError as error:
        log.warning("%s", error)
        return None
    return row if row is not None and row["status"] == "complete" else None


def failed(failures: Sequence[Failure], total: int) -> UserError:
    """What to say of failures when everything else is done."""
    listed = "; ".join(f"{failure.run} ({failure.reason})" for failure in failures[:5])
    more = f" and {len(failures) - 5} more" if len(failures) > 5 else ""
    return UserError(
        f"{len(failures)} of {total} runs failed: {listed}{more}; the others are kept, and the same command tries "
        "these again"
    )


def _stop(running: Sequence[_Process]) -> None:
    """Stop as Ctrl-C stops a run, and wait until each has written its checkpoint."""
    for one in running:
        if one.process.poll() is None:
            one.process.terminate() if os.name == "nt" else one.process.send_signal(signal.SIGINT)
    for one in running:
        try:
            one.process.wait()
        except KeyboardInterrupt:  # a second Ctrl-C: at once
            one.process.kill()
            one.process.wait()
        one.log.close()
