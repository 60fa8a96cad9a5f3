"""Worker processes that never outlive the process they work for."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
if LINUX:
    _prctl = ctypes.CDLL(None).prctl  # found here: a fork may leave the loader's lock taken


def end_with(parent: int) -> None:
    """Let this process be killed when `parent`, which has just started it, ends in any way. On Linux only."""
    if LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)


def only_killed_by(parent: int) -> None:
    """Leave signals, which may go to the whole process group, to `parent`: it saves, and ends its workers.

    Its processes must be of `context`; elsewhere than on Linux they still heed SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if LINUX:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with(parent)


@contextmanager
def unheard() -> Iterator[None]:
    """No signal reaches a process that is started here before `only_killed_by`; this one hears them afterwards."""
    if not LINUX:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def context() -> BaseContext | None:
    """How to start workers that may ignore SIGTERM; None: in the usual way.

    Multiprocessing ends daemons by SIGTERM when the interpreter exits, and then waits for them: for ever, if they
    ignore it.
    """
    return _Context() if LINUX else None


if LINUX:
    from multiprocessing.context import ForkContext, ForkProcess

    class _Worker(ForkProcess):
        """A forked process that is killed where it is told to terminate."""

        @staticmethod
        def _Popen(process_obj: BaseProcess) -> Any:
            popen = ForkProcess._Popen(process_obj)
            popen.terminate = popen.kill  # type: ignore[method-assign]
            return popen

    class _Context(ForkContext):
        Process = _Worker
