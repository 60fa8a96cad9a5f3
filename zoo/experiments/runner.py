"""Runs in separate processes, several at a time; complete runs are skipped, and stopped runs are resumed."""

import copy
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from filelock import Timeout
from tqdm import tqdm

from kernels import Option, UserError
from mixers.arguments import check_sizes
from zoo.config.parser import parse
from zoo.config.serialise import to_dict
from zoo.display import progress_bar, short_list
from zoo.experiments.definition import Run
from zoo.files.links import held_lock, lock_of, open_in_place
from zoo.files.output import check_no_others, make_folder
from zoo.files.sealed_json import read_sealed, write_sealed
from zoo.runs.folder import LOCK, has_checkpoint
from zoo.train.history import differences
from zoo.train.results import read_row
from zoo.train.signals import PARENT, sigterm_raises

log = logging.getLogger(__name__)

COMMAND = (sys.executable, str(Path(__file__).parents[2] / "cli.py"))  # next to the package, also in a wheel
RECORD = "runs.json"  # the configs of all runs in a folder
POLL_SECONDS = 0.2
GRACE_SECONDS = 120.0  # time for a run of a killed sweep to save and end


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
    """Trains runs with `command`, `jobs` at a time, each in `folder/NAME` with its output in `folder/NAME.log`.

    Repeating the call skips complete runs, resumes those that have a checkpoint, and starts the others again. Ctrl-C or
    SIGTERM stops the running ones as it stops `fit`: each saves a checkpoint.

    Args:
        command: The command that starts the command line, such as `["python", "cli.py"]`.
        folder: The folder of the runs.
        jobs: Number of runs at a time; null for one per GPU, or one without GPUs. If there are more jobs than GPUs,
            they share them. CPU cores are divided among the jobs.
        chain: Whether each run starts from the one before it: one at a time, on all GPUs, until the first failure.
        option: The option that names the folder, for messages.

    Raises:
        UserError: `jobs` is below 1.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        jobs: int | None = None,
        *,
        chain: bool = False,
        option: str = "folder",
    ):
        self.chain, self.option = chain, option
        self.gpus = 0 if chain else torch.cuda.device_count()  # to divide among the runs
        self.command, self.folder, self.jobs = list(command), folder, max(self.gpus, 1) if jobs is None else jobs
        check_sizes({"jobs": jobs})

    def run(self, runs: Sequence[Run]) -> list[Failure]:
        """Run all incomplete runs, and return those that failed.

        Raises:
            UserError: The folder has runs of the same names with other configs, or is in use.
        """
        with self.claimed(runs):
            waiting = deque(run for run in runs if result(self.folder / run.name) is None)
            running: list[_Process] = []
            failures: list[Failure] = []
            slots = set(range(self.jobs))
            done = len(runs) - len(waiting)
            with run_bar(self.folder, len(runs), done) as bar, sigterm_raises():
                try:
                    while waiting or running:
                        while waiting and slots:
                            running.append(self._start(waiting.popleft(), slots.pop()))
                        time.sleep(POLL_SECONDS)
                        for ended in [process for process in running if process.process.poll() is not None]:
                            running.remove(ended)
                            slots.add(ended.slot)
                            ended.log.close()
                            for failure in self._failure(ended.run, ended.process.returncode):
                                failures.append(failure)
                                bar.write(f"{failure.run} failed: {failure.reason}")
                                if self.chain:
                                    waiting.clear()
                            bar.update()
                except (KeyboardInterrupt, SystemExit):
                    bar.write("stopping: what runs is saved, and the same command continues")
                    raise
                finally:
                    _stop(running)
        return failures

    def check_results(self, runs: Sequence[Run], names: Iterable[str]) -> None:
        """Raise a UserError if a file that the results go to exists in a folder which is not that of these runs."""
        if not (self.folder / RECORD).exists() and not any(has_checkpoint(self.folder / run.name) for run in runs):
            check_no_others([self.folder / name for name in names], "folder", RECORD)

    def prepare(self, run: Run) -> list[str]:
        """The command line that starts a run, or resumes it from its last checkpoint.

        A run of a killed sweep may still be saving; this waits for it.

        Raises:
            UserError: Another process trains the run, and does not end; or its folder is a link.
        """
        folder = self.folder / run.name
        if folder.is_symlink():  # another run would be continued
            sentence = "is a link, through which nothing is written; put a folder in its place"
            raise UserError(f"{self.option}: {folder} {sentence}")
        if (folder / LOCK).exists():
            try:
                with lock_of(folder / LOCK).acquire(timeout=GRACE_SECONDS):
                    pass
            except Timeout:
                raise UserError(f"{self.option}: {folder} is being trained by another process; wait for it") from None
        if has_checkpoint(folder):
            return [*self.command, "fit", "--resume", str(folder)]
        return [*self.command, "fit", *run.arguments(), "--run", os.path.join(".", self.folder, run.name)]

    def _start(self, run: Run, slot: int) -> _Process:
        threads = max((os.cpu_count() or 1) // self.jobs, 1)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), PARENT: str(os.getpid())}
        environment.pop("ZOO_RUN", None)
        if self.gpus:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(self.gpus)))
            environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[slot % self.gpus]
        output = open_in_place(self.folder / f"{run.name}.log", "ab")
        # a new session, so that Ctrl-C reaches it only through this process, once
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
        reason, log = f"exit code {code}" if code else "no result", Path(f"{self.folder / run.name}.log")
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:] if log.is_file() else []
        reason = f"{last[0]} " if last and last[0].startswith("error: ") else f"{reason}, "
        return [Failure(run.name, f"{reason}see {log}")]

    @contextmanager
    def claimed(self, runs: Sequence[Run]) -> Iterator[None]:
        """Lock the folder, after checking that it has no other runs with the same names."""
        make_folder(self.folder, self.option)
        busy = f"{self.option}: {self.folder} is in use by another process; wait for it or choose another"
        with held_lock(self.folder / ".lock", busy):
            write_sealed(self.folder / RECORD, self.checked(runs))
            yield

    def checked(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Return the configs of all runs in the folder, with these.

        Raises:
            UserError: The folder has a run of the same name with another config, or a run of a chain whose predecessor
                is not complete.
        """
        file = self.folder / RECORD
        advice = "delete it, and the runs there count as runs of this sweep, or choose another folder"
        recorded = read_sealed(file, advice=advice) if file.is_file() else {}
        for name, config in recorded.items():
            if not isinstance(config, dict) or "model" not in config:
                raise UserError(f"{file} is damaged ({name} has no config); {advice}.")
        for run in runs:
            plain = json.loads(json.dumps(to_dict(run.read())))
            # keys that did not exist when the run was started do not count as differences
            config = recorded.setdefault(run.name, plain)
            old = {**plain, **config}
            started = (self.folder / run.name).exists()
            if started and old != plain:
                old = _completed(old)  # options that a component did not have when the run was started
            if started and old != plain:
                key, before, now = next(differences(old, plain))
                raise UserError(
                    f"{self.option}: {self.folder / run.name} is a run with {key}: {before}, and now it is {now}; "
                    f"delete it, or choose another {self.option}: ",
                    Option(self.option, f"{self.folder}-2"),
                )
            recorded[run.name] = plain
        for before, run in itertools.pairwise(runs) if self.chain else ():
            if result(self.folder / before.name) is None and (self.folder / run.name).exists():
                first = self.folder / before.name
                if has_checkpoint(first):
                    raise UserError(
                        f"{self.option}: {first} has no complete results.json, but {run.name} was trained from it; "
                        "write it again by fit ",
                        Option("resume", str(first)),
                    )
                raise UserError(
                    f"{self.option}: {self.folder / run.name} was trained from another run {before.name}; delete it"
                )
        return recorded


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """Add the defaults of missing options to a recorded config. A config that cannot be read is returned unchanged."""
    try:
        return json.loads(json.dumps(to_dict(parse(copy.deepcopy(config)))))
    except UserError:
        return config


def run_bar(folder: Path, total: int, done: int) -> "tqdm[Any]":
    """A progress bar over runs in a folder, of which `done` are complete."""
    bar = progress_bar(total=total, initial=done, desc="runs", unit="")
    bar.set_postfix_str(f"logs: {folder}/NAME.log")
    return bar


def result(run: Path) -> dict[str, Any] | None:
    """The results row of a complete run; None for an incomplete run or a damaged row, so that it is written again."""
    try:
        row = read_row(run)
    except UserError as error:
        log.warning("%s", error)
        return None
    return row if row is not None and row["status"] == "complete" else None


def failed(failures: Sequence[Failure], total: int) -> UserError:
    """The error for failed runs, after all others have completed."""
    listed = short_list(f"{failure.run} ({failure.reason})" for failure in failures)
    return UserError(
        f"{len(failures)} of {total} runs failed: {listed}; what completed is kept, and the same command tries again"
    )


def _stop(running: Sequence[_Process]) -> None:
    """Stop runs as Ctrl-C does, and wait until each has saved its checkpoint."""
    for _, process, _, _ in running:
        if process.poll() is None:
            process.terminate() if os.name == "nt" else process.send_signal(signal.SIGINT)
    for _, process, output, _ in running:
        try:
            process.wait()
        except KeyboardInterrupt:  # a second Ctrl-C: stop immediately
            process.kill()
            process.wait()
        output.close()
