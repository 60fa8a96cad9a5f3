"""Jobs in several processes, each of which may hang or crash without the others."""

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection, get_context
from time import monotonic
from typing import Any, Generic, NamedTuple, TypeVar

from zoo.train.signals import PARENT, end_with_parent

Job = TypeVar("Job")
Result = TypeVar("Result")
RESULT, FINISHED, RAISED = "result", "finished", "raised"  # what a process sends
PATIENCE = 10.0  # seconds for a process that was killed to end


class Done(NamedTuple, Generic[Job, Result]):
    """A job that has ended.

    Attributes:
        job: The job.
        results: Everything that it yielded.
        seconds: How long it took.
        problem: Why it ended early; null if it did not.
    """

    job: Job
    results: list[Result]
    seconds: float
    problem: str | None = None


class _Worker(Generic[Job, Result]):
    """A process that works on one job after the other."""

    def __init__(self, work: Callable[[Job], Iterable[Result]]):
        context = get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, job: Job) -> None:
        """Start with a job."""
        self.job, self.start, self.results = job, monotonic(), list[Result]()
        self.connection.send(job)

    def receive(self) -> Done[Job, Result] | None:
        """Take one message: null while the job runs."""
        try:
            what, result = self.connection.recv()
        except (EOFError, OSError):  # the process has died
            self.process.join(PATIENCE)
            return self.done(f"the process ended with exit code {self.process.exitcode}")
        if what != RESULT:
            return self.done(result)
        self.results.append(result)
        return None

    def done(self, problem: str | None = None) -> Done[Job, Result]:
        """End the job, and after a problem the process."""
        if problem is not None:
            self.stop()
        return Done(self.job, self.results, monotonic() - self.start, problem)

    def stop(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.join(PATIENCE)
        self.connection.close()


def side_by_side(
    work: Callable[[Job], Iterable[Result]], jobs: Iterable[Job], workers: int, limit: float
) -> Iterator[Done[Job, Result]]:
    """Do jobs in several processes, and yield each when it has ended.

    A process that takes more than `limit` seconds for a job is killed, and another one takes the jobs that are left.
    """
    waiting, busy, idle = deque(jobs), list[_Worker[Job, Result]](), list[_Worker[Job, Result]]()
    try:
        while waiting or busy:
            while waiting and len(busy) < workers:
                worker = idle.pop() if idle else _Worker(work)
                worker.begin(waiting.popleft())
                busy.append(worker)
            due = min(worker.start for worker in busy) + limit
            ready = connection.wait([worker.connection for worker in busy], max(0.0, due - monotonic()))
            for worker in [*busy]:
                done = worker.receive() if worker.connection in ready else None
                if done is None and monotonic() - worker.start > limit:
                    done = worker.done(f"did not finish in {limit:.0f} s")
                if done is not None:
                    busy.remove(worker)
                    idle += [worker] if done.problem is None else []
                    yield done
    finally:
        for worker in (*busy, *idle):
            worker.stop()


def _serve(jobs: Any, work: Callable[[Any], Iterable[Any]]) -> None:
    """Work on what arrives until the other side is closed; what compilers and libraries print goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.environ[PARENT] = str(os.getppid())
    end_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        try:
            for result in work(job):
                jobs.send((RESULT, result))
        except Exception as error:  # of any type; a GPU may be of no more use to this process
            jobs.send((RAISED, f"{type(error).__name__}: {' '.join(str(error).split())}"))
            return
        jobs.send((FINISHED, None))
