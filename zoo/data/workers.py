"""Worker processes that never outlive their parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
if LINUX:
    _prctl = ctypes.CDLL(None).prctl  # looked up before any fork, which may leave the dynamic loader's lock held


def end_with(parent: int) -> None:
    """Have the system kill this process when `parent`, which has just started it, ends in any way. Linux only."""
    if LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)


def only_killed_by(parent: int) -> None:
    """Ignore signals, which may go to the whole process group: `parent` handles them, saves, and stops this process.

    The process must be started by `context`. Except on Linux it still obeys SIGTERM. Connections that break, as they do
    when `parent` is killed, are not reported.
    """
    report = sys.excepthook

    def report_others(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not issubclass(kind, ConnectionError | EOFError):
            report(kind, error, traceback)

    sys.excepthook = report_others  # the thread of multiprocessing that passes on tensors reports through it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if LINUX:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with(parent)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals while workers start, so that none reaches them before `only_killed_by`; deliver them afterwards."""
    if not LINUX:
        yield
        return
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def context() -> BaseContext | None:
    """The multiprocessing context for workers that ignore SIGTERM; None for the default.

    When the interpreter exits, multiprocessing sends SIGTERM to daemons and waits for them: forever, if they ignore it.
    """
    return _Context() if LINUX else None


if LINUX:
    from multiprocessing.context import ForkContext, ForkProcess

    class _Worker(ForkProcess):
        """A forked process whose `terminate` kills it."""

        @staticmethod
        def _Popen(process_obj: BaseProcess) -> Any:
            popen = ForkProcess._Popen(process_obj)
            popen.terminate = popen.kill  # type: ignore[method-assign]
            return popen

    class _Context(ForkContext):
        Process = _Worker
